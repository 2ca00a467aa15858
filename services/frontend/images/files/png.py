"""PNG files: a signature and chunks with checksums."""

import struct
import zlib
from collections.abc import Iterator

from services.frontend.images.files.orientation import exif_orientation
from services.frontend.images.files.stripped import UPRIGHT, Stripped, damaged, truncated

SIGNATURE = b"\x89PNG\r\n\x1a\n"
MAX_CHUNKS = 2**15
"""A file of 20 MiB whose encoder writes 1 KiB a time has 20,480."""
_HEADER = struct.Struct(">I4s")
_CHECKSUM = struct.Struct(">I")
_IMAGE = struct.Struct(">IIBBBBB")
_COLOUR_TYPE_OFFSET = 25
_PALETTE = 3
_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height.

    Raises:
        InvalidRequestError: the file does not begin with a header.
    """
    if len(data) < 33:
        raise truncated("PNG")
    if _HEADER.unpack_from(data, 8) != (13, b"IHDR"):
        raise damaged("PNG", "it does not begin with IHDR")
    width, height, _, _, *methods = _IMAGE.unpack_from(data, 16)
    if methods not in ([0, 0, 0], [0, 0, 1]):
        raise damaged("PNG", "its compression, filter or interlacing is unknown")
    return width, height


def strip(data: bytes) -> Stripped:
    """Checks all chunks and keeps the ones that have pixels.

    Dropping text, profiles and animation frames also drops the bombs that they can be.

    Raises:
        InvalidRequestError: a chunk is cut off, has a wrong checksum or is where none may be.
    """
    kept: list[memoryview | bytes] = [SIGNATURE]
    kinds: list[bytes] = []
    orientation = UPRIGHT
    for kind, whole in _chunks(memoryview(data)):
        if kind == b"eXIf":
            orientation = exif_orientation(bytes(whole[8:-4]))
        elif kind in _NEEDED:
            kept.append(whole)
            if kinds[-1:] != [kind] or kind != b"IDAT":
                kinds.append(kind)
        elif kind[:1].isupper():
            raise damaged("PNG", "it has an unknown critical chunk")
    if data[_COLOUR_TYPE_OFFSET] == _PALETTE and kinds[1:2] != [b"PLTE"]:
        raise damaged("PNG", "it has no palette")
    ordered = [kind for kind in kinds if kind not in (b"PLTE", b"tRNS")]
    if ordered != [b"IHDR", b"IDAT", b"IEND"] or len(kinds) != len(set(kinds)):
        raise damaged("PNG", "its chunks are missing, repeated or out of order")
    return Stripped(b"".join(kept), orientation)


def _chunks(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yields the kind and all bytes of each chunk up to the end."""
    offset = len(SIGNATURE)
    for _ in range(MAX_CHUNKS):
        if len(data) < offset + _HEADER.size + _CHECKSUM.size:
            raise truncated("PNG")
        length, kind = _HEADER.unpack_from(data, offset)
        end = offset + _HEADER.size + length + _CHECKSUM.size
        if end > len(data):
            raise truncated("PNG")
        whole = data[offset:end]
        [checksum] = _CHECKSUM.unpack_from(whole, len(whole) - 4)
        if checksum != zlib.crc32(whole[4:-4]):
            raise damaged("PNG", "a chunk has a wrong checksum")
        yield kind, whole
        if kind == b"IEND":
            return
        offset = end
    raise damaged("PNG", f"it has over {MAX_CHUNKS} chunks")
