"""WebP files: chunks in a RIFF container."""

import struct
from collections.abc import Iterator

from services.frontend.images.files.orientation import exif_orientation
from services.frontend.images.files.stripped import UPRIGHT, Stripped, damaged, truncated

MAX_CHUNKS = 2**14
"""An animation has one for each frame."""
_CHUNK = struct.Struct("<4sI")
_RIFF = struct.Struct("<4sI4s")
_ANIMATION = 0x02
_ALPHA = 0x10
_IMAGES = {b"VP8 ", b"VP8L", b"ANMF"}
_NEEDED = {b"ALPH", b"ANIM", *_IMAGES}


def is_webp(data: bytes) -> bool:
    """Whether a file begins as WebP files do."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height of the canvas.

    Raises:
        InvalidRequestError: the first chunk has no size.
    """
    if len(data) < 30:
        raise truncated("WebP")
    kind, _ = _CHUNK.unpack_from(data, 12)
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        [bits] = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise damaged("WebP", "it does not begin with a picture")


def strip(data: bytes) -> Stripped:
    """Checks all chunks and keeps the first frame.

    Raises:
        InvalidRequestError: a chunk is cut off, or there is no picture.
    """
    kept: list[memoryview | bytes] = []
    orientation = UPRIGHT
    has_image = False
    for kind, whole in _chunks(memoryview(data)):
        if kind == b"EXIF":
            orientation = exif_orientation(bytes(whole[_CHUNK.size :]))
        elif kind == b"VP8X":
            if kept or len(whole) != 18:
                raise damaged("WebP", "its header is out of order")
            flags = whole[8] & (_ANIMATION | _ALPHA)
            kept.append(bytes((*whole[:8], flags, *whole[9:])))
        elif kind in _NEEDED and not has_image:
            kept.append(whole)
            has_image = kind in _IMAGES
    if not has_image:
        raise damaged("WebP", "it has no picture")
    size = 4 + sum(len(chunk) for chunk in kept)
    return Stripped(b"".join((_RIFF.pack(b"RIFF", size, b"WEBP"), *kept)), orientation)


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yields the kind and all bytes of each chunk."""
    _, size, _ = _RIFF.unpack_from(data)
    riff_end = 8 + size
    if riff_end > len(data):
        raise truncated("WebP")
    offset = _RIFF.size
    for _ in range(MAX_CHUNKS):
        if offset >= riff_end:
            return
        if offset + _CHUNK.size > riff_end:
            raise truncated("WebP")
        kind, length = _CHUNK.unpack_from(data, offset)
        end = offset + _CHUNK.size + length + length % 2
        if end > riff_end:
            raise truncated("WebP")
        yield kind, data[offset:end]
        offset = end
    raise damaged("WebP", f"it has over {MAX_CHUNKS} chunks")
