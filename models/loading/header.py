"""Finds the damage in a safetensors file that its library refuses.

The library's messages name no tensor; this reads the header again to name it.
Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import json
from math import prod
from pathlib import Path
from typing import TypeGuard

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000


def find_damage(file: Path) -> str | None:
    """Describes the file's damage, with the name of the damaged tensor.

    None if the file looks sound, or cannot be read at all.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = stream.seek(0, 2)
            stream.seek(0)
            header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            data_bytes = file_bytes - LENGTH_BYTES - header_bytes
            if data_bytes < 0 or header_bytes > MAX_HEADER_BYTES:
                return f"its header is {header_bytes} bytes long, the file {file_bytes}"
            header = json.loads(stream.read(header_bytes))
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        return f"its header is not JSON: {type(error).__name__}: {error}"
    if not isinstance(header, dict):
        return "its header is not a JSON object"
    header.pop("__metadata__", None)
    return _find_damaged_tensor(header, data_bytes)


def _find_damaged_tensor(header: dict[str, object], data_bytes: int) -> str | None:
    """Describes the damage of the first wrong entry."""
    spans = []
    for name, entry in header.items():
        span = _span(entry)
        if isinstance(span, str):
            return f"tensor {name}: {span}"
        spans.append((*span, name))
    position = 0
    for start, end, name in sorted(spans):
        if end > data_bytes:
            return f"tensor {name} ends at byte {end} of {data_bytes}"
        if start != position:
            return f"tensor {name} begins at byte {start}; the one before it ends at {position}"
        position = end
    return None if position == data_bytes else f"bytes {position} to {data_bytes} are no tensor's"


def _span(entry: object) -> tuple[int, int] | str:
    """Returns the first and last byte of a tensor, or describes the damage of its entry."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return f"its dtype is {dtype!r}"
    if not _are_sizes(shape):
        return f"its shape is {shape!r}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"its data_offsets are {offsets!r}"
    start, end = offsets
    if prod(shape) * ITEM_BYTES[dtype] != end - start:
        return f"its shape {shape} of {dtype} does not fill {end - start} bytes"
    return start, end


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
