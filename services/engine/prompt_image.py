"""Images in prompts, as the encoder takes them."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from services.engine.patch_memory import PatchMemory


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class EncoderImage:
    """An image in patches; requests that show the same one share it.

    digest: of the processor's settings, the grid and the patches, 32 bytes.
    patches: uint8 [N, bytes of a patch].
    grid: their positions, as the processor writes them.
    place: where the patches are in memory that workers share; None if they are not.
    """

    digest: bytes
    patches: bytes | memoryview
    grid: tuple[int, ...]
    place: int | None = None

    @classmethod
    def joined(
        cls,
        parts: Sequence[bytes],
        *,
        digest: bytes,
        grid: tuple[int, ...],
        memory: PatchMemory | None = None,
    ) -> Self:
        """Returns an image of parts of its patches, in `memory` if that has room.

        The place is freed with the image, so steps in flight keep the images that they encode.
        """
        place = None if memory is None else memory.put(parts)
        if memory is None or place is None:
            return cls(digest=digest, patches=b"".join(parts), grid=grid)
        patches = memory.read(place, sum(map(len, parts)))
        image = cls(digest=digest, patches=patches, grid=grid, place=place)
        weakref.finalize(image, memory.free, place)
        return image


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PromptImage:
    """An image at its place in a prompt.

    offset, num_tokens: its tokens, with the image token once for each vector.
    num_vectors: of the encoder.
    """

    image: EncoderImage
    offset: int
    num_tokens: int
    num_vectors: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.num_tokens

    def is_at(self, start: int, end: int) -> bool:
        """Whether some of its tokens are at positions from start to end - 1."""
        return self.offset < end and start < self.end
