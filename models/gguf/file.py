"""Reads the header of a GGUF file, within limits.

Everything that a file says of sizes is checked before memory is allocated for it.
Source of the format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from models.gguf.errors import GgufError
from models.gguf.tensor_types import TensorType, tensor_type

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 4096
MAX_TENSORS = 2**17
MAX_ITEMS = 2**22
"""Most elements of an array: tables of tokens and merges have one for each."""
MAX_KEY_BYTES = 1024
MAX_STRING_BYTES = 2**22
"""Most bytes of a value; chat templates are the longest."""
MAX_HEADER_BYTES = 2**28
"""Most bytes before the tensors; a vocabulary of 262,144 tokens takes 2^23."""
MAX_DIMENSIONS = 4
MAX_DIMENSION = 2**31
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 2**16

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"

Scalar = int | float | str | bool
Value = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is.

    shape: outermost dimension first; the last one is that of rows.
    """

    file: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[-1] // self.type.block_size * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, which are contiguous."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a file.

    Raises:
        GgufError: the file cannot be read, is damaged, or has a value above its limit.
    """
    try:
        _check_regular(path)
        with path.open("rb") as stream:
            return _Header(path, stream).read()
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}") from error
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from error


def _check_regular(path: Path) -> None:
    """Checks that opening a file does not wait, as it does for a pipe."""
    if not S_ISREG(path.stat().st_mode):
        raise GgufError("it is not a regular file")


class _Header:
    """Reads one header from front to back."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._file_bytes = stream.seek(0, 2)
        stream.seek(0)
        self._left = min(self._file_bytes, MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise GgufError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise GgufError(f"its version is {version}; 2 and 3 are supported, little-endian")
        num_tensors = self._count("tensors", MAX_TENSORS, least_bytes=24)
        num_fields = self._count("metadata fields", MAX_FIELDS, least_bytes=13)
        metadata: dict[str, Value] = {}
        for _ in range(num_fields):
            key = self._text(MAX_KEY_BYTES)
            if key in metadata:
                raise GgufError(f"it has {key!r} twice")
            metadata[key] = self._value()
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = _aligned(self._stream.tell(), _alignment(metadata))
        tensors = tuple(_placed(self._path, start, *info) for info in infos)
        _check_places(tensors, _alignment(metadata), self._file_bytes)
        return GgufFile(self._path, metadata, tensors)

    def _bytes(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            limit = "the file" if self._left < MAX_HEADER_BYTES else "its limit"
            raise GgufError(f"its header is longer than {limit}")
        content = self._stream.read(num_bytes)
        if len(content) != num_bytes:
            raise GgufError("its header ends early")
        self._left -= num_bytes
        return content

    def _number(self, code: str) -> Scalar:
        [value] = struct.unpack(code, self._bytes(struct.calcsize(code)))
        return value  # type: ignore[no-any-return]  # a scalar of the code

    def _count(self, of: str, limit: int, *, least_bytes: int) -> int:
        """Reads how many entries follow; each takes `least_bytes` or more."""
        [count] = struct.unpack("<Q", self._bytes(8))
        if count > limit:
            raise GgufError(f"it has {count} {of}; the limit is {limit}")
        if count * least_bytes > self._left:
            raise GgufError(f"it has {count} {of}, for which the file is too short")
        return int(count)

    def _text(self, limit: int) -> str:
        return _decoded(self._bytes(self._count("bytes in a string", limit, least_bytes=1)))

    def _value(self) -> Value:
        kind = self._number("<I")
        if kind != _ARRAY:
            return self._scalar(kind)
        kind = self._number("<I")
        if kind == _ARRAY:
            raise GgufError("it has arrays of arrays, which are not supported")
        if kind != _STRING:
            return self._numbers(kind)
        return self._texts(self._count("elements in an array", MAX_ITEMS, least_bytes=8))

    def _texts(self, count: int) -> list[Scalar]:
        """Reads strings; a vocabulary has hundreds of thousands."""
        read, left = self._stream.read, self._left
        found: list[Scalar] = []
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            left -= 8 + length
            if left < 0 or length > MAX_STRING_BYTES:
                raise GgufError(f"it has a string of {length} bytes, for which there is no room")
            found.append(_decoded(read(length)))
        self._left = left
        return found

    def _numbers(self, kind: Scalar) -> list[Scalar]:
        code = _scalar_code(kind)
        size = struct.calcsize(code)
        count = self._count("elements in an array", MAX_ITEMS, least_bytes=size)
        return list(struct.unpack(f"<{count}{code[1]}", self._bytes(count * size)))

    def _scalar(self, kind: Scalar) -> Scalar:
        return self._text(MAX_STRING_BYTES) if kind == _STRING else self._number(_scalar_code(kind))

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        """Returns name, number of the type, shape, and offset from the first tensor."""
        name = self._text(MAX_KEY_BYTES)
        [count] = struct.unpack("<I", self._bytes(4))
        if not 1 <= count <= MAX_DIMENSIONS:
            raise GgufError(f"tensor {name!r} has {count} dimensions; 1 to {MAX_DIMENSIONS} may be")
        sizes = struct.unpack(f"<{count}Q", self._bytes(8 * count))
        if not all(1 <= size <= MAX_DIMENSION for size in sizes):
            raise GgufError(
                f"tensor {name!r} has the shape {sizes}; sizes are 1 to {MAX_DIMENSION}"
            )
        number, offset = struct.unpack("<IQ", self._bytes(12))
        return name, number, sizes[::-1], offset


def _decoded(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise GgufError("a string is not UTF-8") from error


def _scalar_code(kind: Scalar) -> str:
    if not isinstance(kind, int) or kind not in _SCALARS:
        raise GgufError(f"it has a value of type {kind}, which GGUF does not have")
    return _SCALARS[kind]


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get(_ALIGNMENT_KEY, 32)
    is_power = (
        type(value) is int and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT and not value & value - 1
    )
    if not is_power or not isinstance(value, int):
        raise GgufError(
            f"{_ALIGNMENT_KEY} is {value!r}; it must be a power of two from {MIN_ALIGNMENT} on"
        )
    return value


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _placed(
    path: Path, start: int, name: str, number: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    try:
        kind = tensor_type(number)
    except GgufError as error:
        raise GgufError(f"tensor {name!r}: {error}") from error
    if shape[-1] % kind.block_size:
        raise GgufError(
            f"tensor {name!r}: blocks of {kind.block_size} do not fill rows of {shape[-1]}"
        )
    return GgufTensor(path, name, kind, shape, start + offset)


def _check_places(tensors: tuple[GgufTensor, ...], alignment: int, file_bytes: int) -> None:
    """Checks that tensors are within the file, aligned and apart, and have different names."""
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise GgufError("two of its tensors have the same name")
    end = 0
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset % alignment:
            raise GgufError(f"tensor {tensor.name!r} begins at {tensor.offset}, unaligned")
        if tensor.offset < end:
            raise GgufError(f"tensor {tensor.name!r} begins in another")
        end = tensor.offset + tensor.num_bytes
        if end > file_bytes:
            raise GgufError(f"tensor {tensor.name!r} ends at byte {end} of {file_bytes}")
