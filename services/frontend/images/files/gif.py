"""GIF files: a screen, and blocks in pieces of up to 255 bytes."""

import struct

from services.frontend.images.files.stripped import Stripped, damaged, truncated

SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_PIECES = 2**17
"""A frame of 20 MiB has 82,000."""
_SCREEN = struct.Struct("<6sHHBBB")
_FRAME = struct.Struct("<BHHHHB")
_EXTENSION, _FRAME_MARK, _GRAPHIC_CONTROL = 0x21, 0x2C, 0xF9
_TRAILER = b";"


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height of the screen.

    Raises:
        InvalidRequestError: the file is too short to have one.
    """
    if len(data) < _SCREEN.size:
        raise truncated("GIF")
    _, width, height, *_ = _SCREEN.unpack_from(data)
    return width, height


def strip(data: bytes) -> Stripped:
    """Keeps the first frame.

    Raises:
        InvalidRequestError: it is cut off, is beyond the screen or does not exist.
    """
    offset = _after_table(data, _SCREEN.size, data[10])
    kept = [data[:offset]]
    budget = [MAX_PIECES]
    while data[offset : offset + 1] == bytes((_EXTENSION,)):
        end = _after_pieces(data, offset + 2, budget)
        if data[offset + 1 : offset + 2] == bytes((_GRAPHIC_CONTROL,)):
            kept[1:] = [data[offset:end]]
        offset = end
    if len(data) < offset + _FRAME.size:
        raise truncated("GIF")
    mark, left, top, width, height, flags = _FRAME.unpack_from(data, offset)
    screen_width, screen_height = size_of(data)
    if mark != _FRAME_MARK:
        raise damaged("GIF", "it has no frame")
    if not width or not height or left + width > screen_width or top + height > screen_height:
        raise damaged("GIF", "its first frame is empty or beyond the screen")
    # A byte with the size of codes comes before the pieces.
    end = _after_pieces(data, _after_table(data, offset + _FRAME.size, flags) + 1, budget)
    return Stripped(b"".join((*kept, data[offset:end], _TRAILER)))


def _after_table(data: bytes, offset: int, flags: int) -> int:
    """Returns the offset after a colour table, if the flags announce one."""
    end = offset + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    if end > len(data):
        raise truncated("GIF")
    return end


def _after_pieces(data: bytes, offset: int, budget: list[int]) -> int:
    """Returns the offset after pieces and the empty one that ends them."""
    while offset < len(data):
        length = data[offset]
        offset += 1 + length
        if not length:
            return offset
        budget[0] -= 1
        if budget[0] < 0:
            raise damaged("GIF", f"it has over {MAX_PIECES} pieces")
    raise truncated("GIF")
