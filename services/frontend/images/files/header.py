"""Recognizes image files and reads their size, before anything is decoded."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from services.frontend.errors import InvalidRequestError
from services.frontend.images.files import gif, jpeg, png, webp
from services.frontend.images.limits import ImageLimits

_SUPPORTED = "send PNG, JPEG, WebP or GIF"
_UNSUPPORTED = (
    (b"BM", "a BMP image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"II+\0", "a TIFF image"),
    (b"MM\0+", "a TIFF image"),
    (b"\0\0\1\0", "an icon"),
    (b"8BPS", "a Photoshop file"),
    (b"%!PS", "a PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file"),
    (b"%PDF", "a PDF file"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"qoif", "a QOI image"),
    (b"DDS ", "a DDS image"),
    (b"\x76\x2f\x31\x01", "an OpenEXR image"),
    (b"icns", "an icon"),
    (b"RIFF", "a RIFF file"),
    (b"OggS", "an Ogg file"),
    (b"\x1aE\xdf\xa3", "a Matroska file"),
    (b"PK\3\4", "a ZIP file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x8aMNG", "an MNG animation"),
    (b"\x8bJNG", "a JNG image"),
    *((f"P{digit}".encode(), "a PNM image") for digit in range(1, 8)),
)
_SEARCHED_BYTES = 1024
"""Leading bytes in which markup is recognized."""


class Format(StrEnum):
    """Formats that are decoded."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"


@dataclass(frozen=True, slots=True)
class Header:
    """A file's format and size."""

    format: Format
    width: int
    height: int


_SIZES: dict[Format, Callable[[bytes], tuple[int, int]]] = {
    Format.PNG: png.size_of,
    Format.JPEG: jpeg.size_of,
    Format.WEBP: webp.size_of,
    Format.GIF: gif.size_of,
}


def read_header(data: bytes, limits: ImageLimits) -> Header:
    """Returns the header of a file that is worth decoding.

    Raises:
        InvalidRequestError: the file is of another format, over a limit, or has no size.
    """
    if len(data) > limits.max_bytes:
        raise InvalidRequestError(
            f"the image has {len(data)} bytes; the limit is {limits.max_bytes}"
        )
    found = _format_of(data)
    width, height = _SIZES[found](data)
    if not width or not height:
        raise InvalidRequestError(f"the {found} file has a size of {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise InvalidRequestError(
            f"the image has {width} x {height} pixels; the limit is {limits.max_pixels}"
        )
    return Header(found, width, height)


def _format_of(data: bytes) -> Format:
    if data.startswith(png.SIGNATURE):
        return Format.PNG
    if data.startswith(jpeg.SIGNATURE):
        return Format.JPEG
    if data.startswith(gif.SIGNATURES):
        return Format.GIF
    if webp.is_webp(data):
        return Format.WEBP
    raise InvalidRequestError(f"{_name_of(data)} is not supported; {_SUPPORTED}")


def _name_of(data: bytes) -> str:
    """Returns a noun for a file that is not supported."""
    if not data:
        return "an empty file"
    if data[4:8] == b"ftyp":
        return "an AVIF, HEIC or MP4 file"
    for signature, name in _UNSUPPORTED:
        if data.startswith(signature):
            return name
    start = data[:_SEARCHED_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"<"):
        return "an SVG image" if b"<svg" in start else "a markup file"
    return "a file that is no known image"
