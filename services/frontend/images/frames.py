"""The messages between `reader` and its helper processes: plain bytes, safe to read."""

import json
import struct
from dataclasses import asdict, dataclass

from services.frontend.images.families.family import Grid, Patches
from services.frontend.images.limits import ImageLimits

_QUESTION = struct.Struct(">?I")
_MAX_GRID = 8
HEAD_BYTES = 1 + 4 * _MAX_GRID
"""Most bytes of an answer besides the patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The settings of a helper process."""

    kind: str
    settings: str
    image_token_id: int
    max_patches: int
    limits: ImageLimits

    def to_bytes(self) -> bytes:
        """Returns the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Opening":
        """Reads a message."""
        fields = json.loads(content)
        return cls(**{**fields, "limits": ImageLimits(**fields["limits"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An image to read."""

    data: bytes
    is_only_image: bool
    max_patches: int

    def to_bytes(self) -> bytes:
        """Returns the message."""
        return _QUESTION.pack(self.is_only_image, self.max_patches) + self.data

    @classmethod
    def from_bytes(cls, content: bytes) -> "Question":
        """Reads a message."""
        is_only_image, max_patches = _QUESTION.unpack_from(content)
        data = content[_QUESTION.size :]
        return cls(data=data, is_only_image=is_only_image, max_patches=max_patches)


def answer_of(patches: Patches) -> tuple[bytes, memoryview]:
    """Returns the parts of the answer with an image's patches."""
    grid = patches.grid
    head = struct.pack(f">B{len(grid)}I", len(grid), *grid)
    return head, patches.values.data.cast("B")


def read_answer(content: bytes) -> tuple[Grid, memoryview]:
    """Returns the grid and the patches of an answer, which are a part of it.

    Raises:
        ValueError: the answer is none.
    """
    length = content[0] if content else 0
    end = 1 + 4 * length
    if not 0 < length <= _MAX_GRID or len(content) < end:
        raise ValueError("an answer without a grid")
    return struct.unpack_from(f">{length}I", content, 1), memoryview(content)[end:]
