"""Parts of image files, and pictures that look like photographs."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    """Returns smooth colours with noise."""
    generator = np.random.default_rng(width)
    coarse = generator.integers(0, 256, (8, 8, 4), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noise = generator.integers(0, 32, smooth.shape, dtype=np.uint8)
    return Image.fromarray(smooth // 8 * 7 + noise).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Returns an image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes = b"", *, checksum: int | None = None) -> bytes:
    """Returns a PNG chunk."""
    if checksum is None:
        checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def ihdr(width: int = 8, height: int = 8, depth: int = 8, colour: int = 2, tail: bytes = b"\0\0\0"):
    """Returns a PNG header."""
    return chunk(b"IHDR", struct.pack(">IIBB", width, height, depth, colour) + tail)


def rows(width: int = 8, height: int = 8, channels: int = 3, filter_type: int = 0) -> bytes:
    """Returns a PNG chunk of gray pixels."""
    line = bytes((filter_type,)) + b"\x80" * width * channels
    return chunk(b"IDAT", zlib.compress(line * height))


def png(*chunks: bytes) -> bytes:
    """Returns a PNG file of chunks."""
    return b"".join((PNG, *chunks, chunk(b"IEND")))


def inflating(num_bytes: int) -> bytes:
    """Returns zlib data that inflates to zeros."""
    deflate = zlib.compressobj(9)
    block = bytes(2**20)
    parts = [deflate.compress(block) for _ in range(num_bytes // len(block))]
    return b"".join((*parts, deflate.flush()))


def segment(marker: int, content: bytes = b"") -> bytes:
    """Returns a JPEG segment."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def frame(width: int, height: int, *, marker: int = 0xC0, precision: int = 8, tail: bytes = b""):
    """Returns a JPEG frame header of one component."""
    tail = tail or b"\1\1\x11\0"
    return segment(marker, struct.pack(">BHH", precision, height, width) + tail)


def riff(*chunks: bytes, kind: bytes = b"WEBP", size: int | None = None) -> bytes:
    """Returns a RIFF file."""
    content = kind + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content) if size is None else size) + content


def riff_chunk(kind: bytes, content: bytes = b"", *, length: int | None = None) -> bytes:
    """Returns a chunk of a RIFF file."""
    head = kind + struct.pack("<I", len(content) if length is None else length)
    return head + content + bytes(len(content) % 2)


def vp8x(width: int, height: int, flags: int = 0) -> bytes:
    """Returns the header of an extended WebP file."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return riff_chunk(b"VP8X", bytes((flags, 0, 0, 0)) + sides)


def vp8l_header(width: int, height: int) -> bytes:
    """Returns the start of a lossless WebP picture."""
    return b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)


def gif_screen(width: int = 8, height: int = 8, flags: int = 0) -> bytes:
    """Returns the start of a GIF file."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, flags, 0, 0)


def gif_frame(width: int = 8, height: int = 8, left: int = 0, flags: int = 0) -> bytes:
    """Returns a GIF frame's descriptor."""
    return struct.pack("<BHHHHB", 0x2C, left, 0, width, height, flags)


def exif(orientation: int) -> bytes:
    """Returns Exif data with an orientation."""
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()
