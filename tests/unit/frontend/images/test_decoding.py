"""Valid files become what Pillow and transformers make of them."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from services.frontend.errors import InvalidRequestError
from services.frontend.images.files.decoding import decode
from services.frontend.images.files.header import Format, read_header
from services.frontend.images.limits import ImageLimits
from tests.support.image_files import PNG, chunk, encoded, exif, ihdr, picture, png

KINDS = ["PNG", "JPEG", "WEBP", "GIF"]


def read(data: bytes, max_pixels: int = ImageLimits().max_pixels) -> np.ndarray:
    return np.asarray(decode(data, read_header(data, ImageLimits(max_pixels=max_pixels))))


def expected(data: bytes) -> np.ndarray:
    """Returns what transformers sees: white under transparency, upright, the first frame."""
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return convert_to_rgb(upright, return_numpy=True)


def animation(mode: str) -> list[Image.Image]:
    return [picture(40, 30, mode), picture(41, 31, mode).crop((0, 0, 40, 30))]


def files() -> dict[str, bytes]:
    rgba = picture(mode="RGBA")
    palette = picture(mode="P")
    found = {
        **{f"png {mode}": encoded(picture(mode=mode), "PNG") for mode in ("1", "L", "LA", "P")},
        **{f"png {mode}": encoded(picture(mode=mode), "PNG") for mode in ("RGB", "RGBA")},
        "png palette with a transparent colour": encoded(palette, "PNG", transparency=3),
        "png palette with alpha": encoded(palette, "PNG", transparency=bytes(range(0, 250, 2))),
        "png gray with a transparent shade": encoded(picture(mode="L"), "PNG", transparency=99),
        "png with a transparent colour": encoded(picture(), "PNG", transparency=(1, 2, 3)),
        "png animation": encoded(
            picture(), "PNG", save_all=True, append_images=animation("RGB")[1:]
        ),
        "jpeg L": encoded(picture(mode="L"), "JPEG"),
        "jpeg RGB": encoded(picture(), "JPEG"),
        "jpeg CMYK": encoded(picture(mode="CMYK"), "JPEG", quality=90),
        "jpeg progressive": encoded(picture(), "JPEG", progressive=True, subsampling=2),
        "jpeg with a profile": encoded(picture(), "JPEG", icc_profile=bytes(3000)),
        "jpeg with restarts": encoded(picture(), "JPEG", restart_marker_blocks=2),
        "jpeg of several pictures": encoded(
            picture(), "MPO", save_all=True, append_images=animation("RGB")[1:]
        ),
        "webp": encoded(picture(), "WEBP"),
        "webp lossless": encoded(picture(), "WEBP", lossless=True),
        "webp with alpha": encoded(rgba, "WEBP"),
        "webp lossless with alpha": encoded(rgba, "WEBP", lossless=True),
        "webp with a profile": encoded(picture(), "WEBP", icc_profile=bytes(3000)),
        "gif": encoded(palette, "GIF"),
        "gif with a transparent colour": encoded(palette, "GIF", transparency=3),
        "gif interlaced": encoded(palette, "GIF", interlace=1),
        "gif with a comment": encoded(palette, "GIF", comment=b"hello" * 100),
    }
    for kind in ("WEBP", "GIF"):
        for mode in ("RGB", "RGBA"):
            first, *others = animation(mode)
            found[f"{kind.lower()} animation {mode}"] = encoded(
                first, kind, save_all=True, append_images=others, duration=100
            )
    for orientation in range(9):
        for kind in ("PNG", "JPEG", "WEBP"):
            found[f"{kind.lower()} of orientation {orientation}"] = encoded(
                picture(), kind, exif=exif(orientation)
            )
    return found


FILES = files()


@pytest.mark.parametrize("name", FILES)
def test_files_are_decoded_as_transformers_does(name):
    assert np.array_equal(read(FILES[name]), expected(FILES[name]))


def test_exif_of_either_byte_order_is_followed():
    big = b"MM\0*\0\0\0\x08\0\1" + b"\x01\x12\0\3\0\0\0\1\0\6\0\0" + bytes(4)
    data = encoded(picture(), "PNG")
    turned = data[:33] + chunk(b"eXIf", big) + data[33:]
    assert np.array_equal(read(turned), expected(turned))
    assert read(turned).shape == (40, 30, 3)


def test_interlaced_png_files_are_decoded():
    pixels = np.asarray(picture(13, 11))
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2)]
    lines = b"".join(
        b"\0" + line.tobytes()
        for top, left, down, right in [*passes, (1, 0, 2, 1)]
        for line in pixels[top::down, left::right]
    )
    header, rows = ihdr(13, 11, tail=b"\0\0\1"), chunk(b"IDAT", zlib.compress(lines))
    assert np.array_equal(read(png(header, rows)), pixels)


def test_gray_of_16_bits_keeps_its_upper_8():
    gray = np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54
    decoded = read(encoded(Image.fromarray(gray), "PNG"))
    assert np.array_equal(decoded[..., 0], gray >> 8)
    assert (decoded == decoded[..., :1]).all()


def test_transparency_is_white():
    clear = Image.new("RGBA", (2000, 600), (0, 0, 0, 0))
    assert (read(encoded(clear, "PNG")) == 255).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_header_has_format_and_size(kind):
    header = read_header(encoded(picture(33, 22).convert("P").convert("RGB"), kind), ImageLimits())
    assert header.format is Format[kind]
    assert (header.width, header.height) == (33, 22)


def with_checksums(data: bytes) -> bytes:
    """Returns a PNG file whose checksums are right, so that damage reaches the decoder."""
    if not data.startswith(PNG):
        return data
    parts, offset = [PNG], len(PNG)
    while offset + 12 <= len(data):
        [length] = struct.unpack_from(">I", data, offset)
        parts.append(chunk(data[offset + 4 : offset + 8], data[offset + 8 : offset + 8 + length]))
        offset += 12 + length
    return b"".join(parts)


def test_damaged_files_are_refused_or_decoded():
    generator = random.Random(1)
    reasons: list[str] = []
    for _ in range(3000):
        damaged = bytearray(generator.choice(list(FILES.values())))
        for _ in range(generator.choice((1, 1, 2, 5, 30))):
            end = generator.choice((120, len(damaged)))
            damaged[generator.randrange(min(end, len(damaged)))] = generator.randrange(256)
        try:
            read(with_checksums(bytes(damaged)), max_pixels=10**6)
        except InvalidRequestError as error:
            reasons.append(str(error))
    assert 1000 < len(reasons) < 2900
    assert not any("\n" in reason for reason in reasons)
