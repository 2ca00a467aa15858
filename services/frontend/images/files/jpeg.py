"""JPEG files: segments with markers, and scans of compressed data."""

import re
import struct
from collections.abc import Iterator

from services.frontend.errors import InvalidRequestError
from services.frontend.images.files.orientation import exif_orientation
from services.frontend.images.files.stripped import UPRIGHT, Stripped, damaged, truncated

SIGNATURE = b"\xff\xd8\xff"
MAX_SEGMENTS = 1024
MAX_SCANS = 64
"""Each scan of a progressive file is a pass over all pixels; encoders write 6 to 20."""
_SOI, _EOI, _SOS, _APP1, _APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
_FRAMES = {0xC0, 0xC1, 0xC2}
"""Baseline, extended and progressive Huffman coding."""
_OTHER_FRAMES = set(range(0xC0, 0xD0)) - _FRAMES - {0xC4, 0xC8, 0xCC}
"""Arithmetic, lossless and hierarchical coding."""
_NEEDED = {*_FRAMES, 0xC4, 0xDB, 0xDD, 0xE0, _APP14, _SOS}
"""Frames, Huffman and quantization tables, restart intervals, JFIF, Adobe's colours, scans."""
_FILL = re.compile(rb"\xff{1,64}")
"""A marker begins with any number of these bytes; encoders write one."""
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Zeros escape data; 0xd0 to 0xd7 restart the decoder within a scan."""
_EXIF = b"Exif\0\0"


def size_of(data: bytes) -> tuple[int, int]:
    """Returns width and height.

    Raises:
        InvalidRequestError: the file has no frame header, or one that decoders lack.
    """
    for marker, segment in _segments(memoryview(data)):
        if marker in _OTHER_FRAMES:
            raise InvalidRequestError(
                "the JPEG file has arithmetic, lossless or hierarchical coding, which is not"
                " supported"
            )
        if marker in _FRAMES:
            if len(segment) < 9:
                break
            height, width = struct.unpack_from(">HH", segment, 5)
            return width, height
        if marker == _SOS:
            break
    raise damaged("JPEG", "it has no frame header")


def strip(data: bytes) -> Stripped:
    """Checks all segments and keeps the ones that have pixels, without a second picture.

    Raises:
        InvalidRequestError: a segment is cut off, or there are too many frames or scans.
    """
    kept: list[memoryview | bytes] = [SIGNATURE[:2]]
    orientation = UPRIGHT
    num_frames = num_scans = 0
    for marker, segment in _segments(memoryview(data)):
        num_frames += marker in _FRAMES
        num_scans += marker == _SOS
        if marker in _OTHER_FRAMES or num_frames > 1:
            raise damaged("JPEG", "it has several frame headers")
        if num_scans > MAX_SCANS:
            raise InvalidRequestError(f"the JPEG file has over {MAX_SCANS} scans")
        if marker == _APP1 and segment[4:10] == _EXIF and orientation == UPRIGHT:
            orientation = exif_orientation(bytes(segment[4:]))
        elif marker in _NEEDED:
            kept.append(segment)
    if not num_scans:
        raise damaged("JPEG", "it has no scan")
    return Stripped(b"".join((*kept, b"\xff\xd9")), orientation)


def _segments(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yields the marker and all bytes of each segment, scans with their data, up to the end."""
    offset = 2
    for _ in range(MAX_SEGMENTS):
        found = _FILL.match(data, offset)
        offset = found.end() - 1 if found else offset
        if len(data) < offset + 2:
            raise truncated("JPEG")
        if not found or data[offset + 1] == 0xFF:
            raise damaged("JPEG", "a segment has no marker")
        marker = data[offset + 1]
        if marker == _EOI:
            return
        if len(data) < offset + 4:
            raise truncated("JPEG")
        [length] = struct.unpack_from(">H", data, offset + 2)
        if length < 2 or marker <= 1 or 0xD0 <= marker <= _SOI:
            raise damaged("JPEG", "a segment has no length")
        end = offset + 2 + length
        if marker == _SOS:
            found = _NEXT_MARKER.search(data, end)
            end = found.start() if found else len(data) + 1
        if end > len(data):
            raise truncated("JPEG")
        yield marker, data[offset:end]
        offset = end
    raise damaged("JPEG", f"it has over {MAX_SEGMENTS} segments")
