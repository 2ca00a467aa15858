"""Writes tensors that come in chunks into a safetensors file.

Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

from models.loading.header import ITEM_BYTES, LENGTH_BYTES, MAX_HEADER_BYTES
from services.engine.checkpoint.kept_weights import (
    FILE_NAME,
    KeptWeights,
    WeightsFolder,
    check_digest,
)
from services.engine.errors import InvalidRequestError

MAX_TENSORS = 2**20
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8
MAX_BYTES = 2**45
"""No file is larger; products of sizes stay numbers that a disk may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTensor:
    """A tensor that will be sent: its name, safetensors' dtype, sizes and maybe digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Its bytes.

        Raises:
            InvalidRequestError: the description is malformed.
        """
        if not 0 < len(self.name) <= MAX_NAME_LENGTH or not self.name.isprintable():
            raise InvalidRequestError(f"a tensor's name has 1 to {MAX_NAME_LENGTH} characters")
        if self.dtype not in ITEM_BYTES:
            raise InvalidRequestError(f"tensor {self.name}: its dtype is {self.dtype[:64]!r}")
        size = prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.shape) > MAX_DIMENSIONS or size > MAX_BYTES:
            raise InvalidRequestError(f"tensor {self.name}: its shape is {self.shape[:9]}")
        if len(self.sha256) not in (0, hashlib.sha256().digest_size):
            raise InvalidRequestError(f"tensor {self.name}: its sha256 must have 32 bytes")
        return size


class WeightsUpload:
    """One upload: `write` all bytes in order, then `finish`; `discard` it otherwise.

    `write` may run in any thread, one call at a time.
    """

    def __init__(self, folder: WeightsFolder, tensors: Sequence[SentTensor]) -> None:
        """Makes the file with its header.

        Raises:
            NotPermittedError: no weights can be kept.
            InvalidRequestError: a description is malformed or comes twice, or there is no room.
        """
        header, self._ends = _header(tensors)
        num_bytes = self._ends[-1] if self._ends else 0
        names = [each.name for each in tensors]
        self._tensors = tensors
        self._num_written = self._index = 0
        self._digest = hashlib.sha256()
        self._skip_empty()
        self._kept = folder.make_copy(num_bytes + len(header), names)
        try:
            self._file: BinaryIO = (self._kept.folder / FILE_NAME).open("xb")
            self._file.write(header)
        except BaseException:
            self._kept.discard()
            raise

    def write(self, data: bytes) -> None:
        """Writes the next bytes.

        Raises:
            InvalidRequestError: they are too many, the disk is full, or a tensor's digest differs.
        """
        view = memoryview(data)
        if self._num_written + len(view) > (self._ends[-1] if self._ends else 0):
            raise InvalidRequestError("more bytes came than the tensors have")
        try:
            self._file.write(view)
        except OSError as error:
            raise InvalidRequestError(f"the weights cannot be kept: {error.strerror}") from error
        while view:
            part = view[: self._ends[self._index] - self._num_written]
            if self._tensors[self._index].sha256:
                self._digest.update(part)
            self._num_written += len(part)
            view = view[len(part) :]
            self._skip_empty()

    def finish(self) -> KeptWeights:
        """Returns the weights.

        Raises:
            InvalidRequestError: bytes are missing, or the disk is full.
        """
        if self._index < len(self._tensors):
            raise InvalidRequestError(
                f"the stream ends after {self._num_written} of {self._ends[-1]} bytes, in tensor "
                f"{self._tensors[self._index].name}"
            )
        try:
            self._file.close()
        except OSError as error:
            raise InvalidRequestError(f"the weights cannot be kept: {error.strerror}") from error
        return self._kept

    def discard(self) -> None:
        """Removes what was written."""
        self._file.close()
        self._kept.discard()

    def _skip_empty(self) -> None:
        """Goes on to the tensor of the next byte, and compares digests of those before it."""
        while self._index < len(self._ends) and self._num_written == self._ends[self._index]:
            tensor = self._tensors[self._index]
            if tensor.sha256:
                check_digest(self._digest.digest(), tensor.sha256, f"tensor {tensor.name}")
            self._digest = hashlib.sha256()
            self._index += 1


def _header(tensors: Sequence[SentTensor]) -> tuple[bytes, list[int]]:
    """Returns a safetensors header, and the end of each tensor among the bytes after it."""
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise InvalidRequestError(f"an update has 1 to {MAX_TENSORS} tensors")
    entries, ends, end = {}, [], 0
    for each in tensors:
        if each.name in entries or each.name == "__metadata__":
            raise InvalidRequestError(f"tensor {each.name} comes twice, or cannot be named so")
        start, end = end, end + each.num_bytes
        ends.append(end)
        entries[each.name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # readers want the tensors aligned
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidRequestError(f"the header has {len(text)} bytes; at most {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, ends
