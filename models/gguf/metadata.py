"""Typed access to the metadata of a model's architecture."""

import struct
from dataclasses import dataclass
from typing import Any

from models.gguf.errors import GgufError
from models.gguf.model import GgufModel

ARCHITECTURE_KEY = "general.architecture"
MAX_COUNT = 2**31
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Metadata:
    """The fields `ARCHITECTURE.name` of a model, and the shapes of its tensors."""

    model: GgufModel

    @property
    def architecture(self) -> str:
        """The name of the architecture, as llama.cpp has it."""
        value = self.model.metadata.get(ARCHITECTURE_KEY)
        if not isinstance(value, str):
            raise GgufError(f"{self.model.path}: {ARCHITECTURE_KEY} is missing")
        return value

    def get(self, name: str) -> Any:
        """Returns a field; None if it is absent."""
        return self.model.metadata.get(f"{self.architecture}.{name}")

    def size(self, name: str, default: int | None = None) -> int:
        """Reads an integer from 1."""
        value = self.count(name, default)
        if not value:
            raise self.error(name, value, "at least 1")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Reads an integer from 0; of a list, whose elements must be equal, the element."""
        value = self.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 <= value < MAX_COUNT:
            raise self.error(name, value, f"one integer from 0 to {MAX_COUNT - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a number, with as many digits as float32 has."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self.error(name, value, "a number")
        return shortest(float(value))

    def has(self, tensor: str) -> bool:
        """Returns whether there is a tensor of that name."""
        return tensor in self.model.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Returns a tensor's shape, outermost dimension first."""
        if tensor not in self.model.tensors:
            raise GgufError(f"{self.model.path}: tensor {tensor} is missing")
        return self.model.tensors[tensor].shape

    def floats(self, tensor: str, limit: int) -> list[float]:
        """Reads the elements of a small F32 vector.

        Raises:
            GgufError: it has another type, or more than `limit` elements.
        """
        stored = self.model.tensors[tensor]
        if stored.type.name != "F32" or stored.num_bytes > 4 * limit or len(stored.shape) != 1:
            raise GgufError(f"{stored.file}: tensor {tensor} is no F32 vector of {limit} at most")
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            content = file.read(stored.num_bytes)
        return [shortest(value) for [value] in struct.iter_unpack("<f", content)]

    def error(self, name: str, value: object, wanted: str) -> GgufError:
        """Returns an error with a field's name and value, and what it must be."""
        shown = repr(value)[:_MAX_SHOWN]
        key = f"{self.architecture}.{name}"
        return GgufError(f"{self.model.path}: {key} is {shown}; it must be {wanted}")


def shortest(value: float) -> float:
    """Returns the number with the fewest digits that float32 rounds to the same value."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if _as_float32(short) == _as_float32(value):
            return short
    return value


def _as_float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<d", value)
