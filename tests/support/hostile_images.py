"""Files that are refused as images, and files whose bombs are left out when they are decoded."""

import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.support.image_files import (
    PNG,
    chunk,
    encoded,
    exif,
    frame,
    gif_frame,
    gif_screen,
    ihdr,
    inflating,
    picture,
    png,
    riff,
    riff_chunk,
    rows,
    segment,
    vp8l_header,
    vp8x,
)

SOI, EOI = b"\xff\xd8", b"\xff\xd9"
SCAN = segment(0xDA, b"\1\1\0\0\x3f\0") + b"\x12\x34"
TABLE = b"\0\0\0\xff\xff\xff"


def refused_files() -> dict[str, bytes]:
    """Returns files that are no pictures, by what is wrong with them."""
    files = (*_pngs(), *_jpegs(), *_webps(), *_gifs(), *_others())
    named = dict(files)
    assert len(named) == len(files), "two files have one name"
    return named


def disarmed_files() -> dict[str, tuple[bytes, bytes]]:
    """Returns files with bombs beside a picture, and the files of the same picture alone."""
    return dict(_disarmed())


def _cut(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    for length in (len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        yield f"{name} cut after {length} bytes", data[:length]


def _pngs() -> Iterator[tuple[str, bytes]]:
    yield from _cut("png", encoded(picture(), "PNG"))
    yield "png signature alone", PNG
    yield "png without its end", png(ihdr(), rows())[:-12]
    yield "png with half an end", png(ihdr(), rows())[:-6]
    yield "png of 65500 x 65500", png(ihdr(65500, 65500, 1, 0), chunk(b"IDAT", inflating(2**26)))
    yield "png of 2**31 - 1 x 1", png(ihdr(2**31 - 1, 1), rows())
    yield "png of 2**32 - 1 squared", png(ihdr(2**32 - 1, 2**32 - 1), rows())
    yield (
        "png of 65500 x 65500 with a palette",
        png(ihdr(65500, 65500, 8, 3), chunk(b"PLTE", bytes(768)), chunk(b"IDAT", inflating(2**26))),
    )
    yield "png of 0 x 0", png(ihdr(0, 0), rows())
    yield "png of 0 x 8", png(ihdr(0, 8), rows())
    yield "png of 8 x 0", png(ihdr(8, 0), rows())
    for wrong in (b"IHDR", b"IDAT", b"IEND"):
        data = bytearray(png(ihdr(), rows()))
        data[
            data.index(wrong) - 4 + 8 + struct.unpack_from(">I", data, data.index(wrong) - 4)[0]
        ] ^= 1
        yield f"png with a wrong checksum of {wrong.decode()}", bytes(data)
    yield "png without a header", png(rows(), rows())
    yield "png with two headers", png(ihdr(), ihdr(9, 9), rows())
    yield "png with a header after its pixels", png(ihdr(), rows(), ihdr(4000, 4000))
    yield "png with a short header", png(chunk(b"IHDR", bytes(12)), rows())
    yield "png without pixels", png(ihdr())
    yield "png with pixels in two places", png(ihdr(), rows(), chunk(b"PLTE", TABLE), rows())
    yield "png with two palettes", png(ihdr(), *[chunk(b"PLTE", TABLE)] * 2, rows())
    yield "png with an unknown critical chunk", png(ihdr(), chunk(b"EVIL"), rows())
    yield "png of 40,000 chunks", png(ihdr(), *[chunk(b"tEXt", b"a\0b")] * 40_000, rows())
    yield (
        "png with a chunk of 4 GiB",
        PNG + ihdr() + struct.pack(">I", 2**32 - 1) + b"IDAT" + b"x" * 99,
    )
    yield "png of garbage", png(ihdr(), chunk(b"IDAT", b"\x55" * 200))
    yield "png with a preset dictionary", png(ihdr(), chunk(b"IDAT", b"\x78\xbb" + bytes(99)))
    yield "png with filter 9", png(ihdr(), rows(filter_type=9))
    yield "png of 3 bits", png(ihdr(depth=3), rows())
    yield "png of colour type 5", png(ihdr(colour=5), rows())
    yield "png with compression 1", png(ihdr(tail=b"\1\0\0"), rows())
    yield "png with filter method 7", png(ihdr(tail=b"\0\7\0"), rows())
    yield "png without a palette", png(ihdr(colour=3), rows(channels=1))
    yield (
        "png cut within its compressed data",
        png(ihdr(400, 400), chunk(b"IDAT", zlib.compress(picture(400, 400).tobytes())[:5000])),
    )
    yield "jng", b"\x8bJNG\r\n\x1a\n" + png(ihdr(), rows())[8:]
    yield "png after a byte", b"\0" + png(ihdr(), rows())
    yield "png with line ends of another system", b"\x89PNG\n\x1a\n" + png(ihdr(), rows())[8:]


def _jpegs() -> Iterator[tuple[str, bytes]]:
    whole = encoded(picture(), "JPEG")
    yield from _cut("jpeg", whole)
    yield from _cut("progressive jpeg", encoded(picture(80, 60), "JPEG", progressive=True))
    yield "jpeg without its end", whole[:-2]
    yield "jpeg of its start alone", SOI + b"\xff"
    yield "jpeg of start and end", SOI + EOI
    yield "jpeg of 65500 x 65500", SOI + frame(65500, 65500) + SCAN + EOI
    yield "jpeg of 0 x 8", SOI + frame(0, 8) + SCAN + EOI
    yield "jpeg of 8 x 0", SOI + frame(8, 0) + SCAN + segment(0xDC, b"\xff\xff") + EOI
    yield "jpeg with two frames", SOI + frame(8, 8) + frame(60000, 60000) + SCAN + EOI
    yield "jpeg with a frame after its scan", whole[:-2] + frame(60000, 60000) + EOI
    yield "jpeg without a frame", SOI + segment(0xDB, bytes(65)) + SCAN + EOI
    yield "jpeg without a scan", SOI + frame(8, 8) + EOI
    yield "jpeg without tables", SOI + frame(8, 8) + SCAN + EOI
    yield "jpeg with a short frame", SOI + segment(0xC0, b"\x08\0\x08") + SCAN + EOI
    for name, marker in (("lossless", 0xC3), ("arithmetic", 0xC9), ("hierarchical", 0xC5)):
        yield f"{name} jpeg", SOI + frame(8, 8, marker=marker) + SCAN + EOI
    at_frame = whole.index(b"\xff\xc0")
    yield "jpeg of 12 bits", whole[: at_frame + 4] + b"\x0c" + whole[at_frame + 5 :]
    yield "jpeg of 5 components", whole[: at_frame + 9] + b"\x05" + whole[at_frame + 10 :]
    yield "jpeg with samples of 0 x 0", whole[: at_frame + 11] + b"\0" + whole[at_frame + 12 :]
    scan = whole[whole.index(b"\xff\xda") : -2]
    yield "jpeg of 1000 scans", whole[:-2] + scan * 1000 + EOI
    yield "jpeg of 5000 segments", SOI + segment(0xFE, b"x") * 5000 + whole[2:]
    yield "jpeg with a segment of no length", SOI + b"\xff\xfe\0\0" + whole[2:]
    yield "jpeg of fill bytes", SOI + b"\xff" * 2**20 + whole[2:]
    yield "jpeg with bytes between segments", SOI + segment(0xFE) + b"junk" + whole[2:]
    yield "jpeg and html", SOI + b"\xff<html><script>alert(1)</script></html>"
    yield "jpeg with a wrong huffman table", whole.replace(b"\xff\xc4\0\x1f", b"\xff\xc4\0\x03", 1)


def _webps() -> Iterator[tuple[str, bytes]]:
    for name, options in (("lossy", {}), ("lossless", {"lossless": True})):
        whole = encoded(picture(), "WEBP", **options)
        yield from _cut(f"{name} webp", whole)
        yield f"{name} webp without a byte", whole[:-1]
        half = whole[: 20 + (len(whole) - 20) // 4 * 2]
        cut_inside = riff(riff_chunk(half[12:16], half[20:]))
        yield f"{name} webp cut inside its container", cut_inside
    vp8 = encoded(picture(), "WEBP")[12:]
    yield "webp canvas of 2**24 squared", riff(vp8x(2**24, 2**24), vp8)
    yield "webp canvas of 16383 squared", riff(vp8x(16383, 16383), vp8)
    yield "webp of 16384 squared", riff(riff_chunk(b"VP8L", vp8l_header(16384, 16384) + bytes(99)))
    yield "webp of 0 x 0", riff(riff_chunk(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + bytes(40)))
    yield "webp with a wrong start", riff(riff_chunk(b"VP8 ", bytes(60)))
    yield "webp with a wrong lossless start", riff(riff_chunk(b"VP8L", bytes(60)))
    yield "webp of garbage", riff(riff_chunk(b"VP8L", vp8l_header(64, 64) + b"\x55" * 500))
    yield "webp without a picture", riff(vp8x(40, 30), riff_chunk(b"EXIF", exif(6)))
    yield "webp whose canvas is smaller than its picture", riff(vp8x(10, 10), vp8)
    yield "webp whose canvas is larger than its picture", riff(vp8x(4000, 4000), vp8)
    yield (
        "webp with a frame beyond its canvas",
        riff(
            vp8x(10, 10, 2),
            riff_chunk(b"ANIM", bytes(6)),
            riff_chunk(b"ANMF", b"\xff\xff\xff\xff\xff\xff\x27\0\0\x1d\0\0\0\0\0\0" + vp8),
        ),
    )
    yield "webp animation without frames", riff(vp8x(10, 10, 2), riff_chunk(b"ANIM", bytes(6)))
    yield "webp with a size of 4 GiB", riff(vp8, size=2**32 - 1)
    yield "webp with a chunk of 4 GiB", riff(riff_chunk(b"VP8 ", vp8[8:], length=2**32 - 2))
    yield "webp of 20,000 chunks", riff(vp8x(40, 30), riff_chunk(b"JUNK") * 20_000, vp8)
    yield "webp with a late header", riff(riff_chunk(b"VP8 ", vp8[8:]), vp8x(4000, 4000))
    yield "avi", riff(bytes(60), kind=b"AVI ")
    yield "webp and html", b"RIFF\0\0\0\0WEBP<script>alert(1)</script>" + bytes(30)


def _gifs() -> Iterator[tuple[str, bytes]]:
    whole = encoded(picture(mode="P"), "GIF")
    yield from _cut("gif", whole)
    pixels = b"\x02\x02\x4c\x01\0"
    screen = gif_screen(flags=0x80) + TABLE
    yield "gif of 65535 x 65535", gif_screen(65535, 65535) + gif_frame(65535, 65535) + pixels + b";"
    yield "gif of 0 x 0", gif_screen(0, 0) + gif_frame() + pixels + b";"
    yield "gif with a frame beyond the screen", screen + gif_frame(65535, 65535) + pixels + b";"
    yield "gif with a frame at the side", screen + gif_frame(8, 8, left=65000) + pixels + b";"
    yield "gif with an empty frame", screen + gif_frame(0, 0) + pixels + b";"
    yield "gif without a frame", screen + b";"
    yield "gif of its screen alone", screen
    yield "gif with half a palette", gif_screen(flags=0x87) + TABLE
    yield "gif with codes of 13 bits", screen + gif_frame() + b"\x0d\x02\x4c\x01\0;"
    yield "gif of few pixels", screen + gif_frame() + pixels + b";"
    yield "gif of no pixels", screen + gif_frame() + b"\x02\0;"
    yield "gif of 200,000 pieces", screen + b"!\xfe" + b"\x01x" * 200_000 + b"\0;"
    yield "gif and javascript", b"GIF89a/*" + bytes(6) + b"*/=alert(1)//;"
    yield "gif of version 90", b"GIF90a" + whole[6:]


def _others() -> Iterator[tuple[str, bytes]]:
    for kind in (
        "BMP",
        "TIFF",
        "ICO",
        "PCX",
        "TGA",
        "PPM",
        "JPEG2000",
        "EPS",
        "PDF",
        "DDS",
        "ICNS",
    ):
        yield kind.lower(), encoded(picture(64, 64), kind)
    for kind in ("SGI", "XBM", "MSP", "SPIDER"):
        mode = {"SGI": "RGB", "SPIDER": "F"}.get(kind, "1")
        yield kind.lower(), encoded(picture(64, 64).convert(mode), kind)
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    yield "svg", svg
    yield "svg with a declaration", b"\xef\xbb\xbf<?xml version='1.0'?>\n" + svg
    yield "svg with entities", b"<!DOCTYPE svg [<!ENTITY a SYSTEM 'file:///etc/passwd'>]>" + svg
    yield "html", b"<!doctype html><script>alert(1)</script>"
    yield "tiff of big end", b"MM\0*" + bytes(99)
    yield "bigtiff", b"II+\0" + bytes(99)
    yield "photoshop", b"8BPS\0\1" + bytes(99)
    yield "postscript", b"%!PS-Adobe-3.0\n(/etc/passwd) (r) file\n"
    yield "avif", b"\0\0\0\x1cftypavif" + bytes(99)
    yield "heic", b"\0\0\0\x1cftypheic" + bytes(99)
    yield "mp4", b"\0\0\0\x1cftypisom" + bytes(99)
    yield "jpeg xl", b"\xff\x0a" + bytes(99)
    yield "qoi", b"qoif" + bytes(99)
    yield "zip", b"PK\3\4" + bytes(99)
    yield "gzip", b"\x1f\x8b" + bytes(99)
    yield "program", b"\x7fELF" + bytes(99)
    yield "text", b"push graphic-context\nfill 'url(https://example.com/)'"
    yield "pickle", b"\x80\x04\x95" + bytes(99)
    yield "windows metafile", b"\xd7\xcd\xc6\x9a" + bytes(99)
    yield "nothing", b""
    yield "a byte", b"\xff"
    yield "zeros", bytes(2**20)


def _disarmed() -> Iterator[tuple[str, tuple[bytes, bytes]]]:
    plain = png(ihdr(), rows())
    bomb = inflating(2**26)
    text = b"a\0\0"
    for name, extra in {
        "compressed text": chunk(b"zTXt", text + bomb),
        "compressed international text": chunk(b"iTXt", b"a\0\1\0\0\0" + bomb),
        "a compressed profile": chunk(b"iCCP", text + bomb),
        "20,000 texts": chunk(b"tEXt", b"a\0b") * 20_000,
        "damaged exif": chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 5000),
        "exif that points at itself": chunk(b"eXIf", b"II*\0\0\0\0\0" + bytes(30)),
    }.items():
        yield f"png with {name}", (png(ihdr(), extra, rows()), plain)
        yield f"png with {name} at the end", (png(ihdr(), rows(), extra), plain)
    control = chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))
    frame_control = struct.pack(">IIIIIHHBB", 0, 8, 8, 0, 0, 1, 1, 0, 0)
    frames = chunk(b"fcTL", frame_control) + chunk(b"fdAT", bytes(4) + bomb)
    yield "png animation of bombs", (png(ihdr(), control, rows(), frames * 5), plain)
    yield "png animation in a png", (png(ihdr(), control, rows(), chunk(b"fdAT", plain)), plain)
    yield "png with a zip file", (plain + b"PK\3\4" + bytes(500), plain)
    yield "png with html", (plain + b"<script>alert(1)</script>", plain)
    line = zlib.compress(bytes(25 * 8) + bytes(2**20))
    yield (
        "png of more rows than it says",
        (
            png(ihdr(), chunk(b"IDAT", line)),
            png(ihdr(), chunk(b"IDAT", zlib.compress(bytes(25 * 8)))),
        ),
    )
    photo = encoded(picture(), "JPEG")
    profile = b"".join(
        segment(0xE2, b"ICC_PROFILE\0" + bytes((index, 255)) + bytes(65000)) for index in range(255)
    )
    yield "jpeg with a profile of 16 MiB", (photo[:2] + profile + photo[2:], photo)
    yield "jpeg with a zip file", (photo + b"PK\3\4" + bytes(500), photo)
    yield (
        "jpeg with 900 comments",
        (photo[:2] + segment(0xFE, bytes(65000)) * 300 + photo[2:], photo),
    )
    yield (
        "jpeg of several pictures",
        (
            encoded(picture(), "MPO", save_all=True, append_images=[picture(41, 31)] * 9),
            photo,
        ),
    )
    damaged_exif = segment(0xE1, b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(99))
    yield "jpeg with damaged exif", (photo[:2] + damaged_exif + photo[2:], photo)
    frames_of = [Image.new("RGB", (40, 30), (index, 0, 0)) for index in range(50)]
    still = encoded(frames_of[0], "WEBP", lossless=True)
    animation = encoded(
        frames_of[0], "WEBP", lossless=True, save_all=True, append_images=frames_of[1:]
    )
    yield "webp animation", (animation, still)
    yield "webp with html", (still + b"<script>alert(1)</script>", still)
    first = encoded(picture(mode="P"), "GIF")
    comments = b"!\xfe" + (b"\xff" + bytes(255)) * 50_000 + b"\0"
    at_frame = len(first) - len(first[first.index(b",\0\0\0\0") :])
    yield "gif with comments of 12 MiB", (first[:at_frame] + comments + first[at_frame:], first)
    yield "gif with javascript", (first + b"*/=alert(1)", first)
