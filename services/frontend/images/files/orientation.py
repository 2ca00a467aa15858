"""Reads the orientation of a picture from Exif data."""

import struct

from services.frontend.images.files.stripped import UPRIGHT

_PREFIX = b"Exif\0\0"
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
_ORIENTATION_TAG = 0x0112
_SHORT = 3
_ENTRY_BYTES = 12
_MAX_ENTRIES = 512


def exif_orientation(exif: bytes) -> int:
    """Returns the orientation, 1 to 8; 1 if there is none or the data is damaged."""
    tiff = exif.removeprefix(_PREFIX)
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return UPRIGHT
    [start] = struct.unpack_from(f"{order}I", tiff, 4)
    if start + 2 > len(tiff):
        return UPRIGHT
    [num_entries] = struct.unpack_from(f"{order}H", tiff, start)
    for index in range(min(num_entries, _MAX_ENTRIES)):
        entry = start + 2 + index * _ENTRY_BYTES
        if entry + _ENTRY_BYTES > len(tiff):
            break
        tag, kind, count, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
        if (tag, kind, count) == (_ORIENTATION_TAG, _SHORT, 1):
            return int(value) if 1 <= value <= 8 else UPRIGHT
    return UPRIGHT
