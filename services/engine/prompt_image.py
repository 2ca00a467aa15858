"""Images in prompts, as the encoder takes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class EncoderImage:
    """An image in patches; requests that show the same one share it.

    digest: of the processor's settings, the grid and the patches, 32 bytes.
    patches: uint8 [N, bytes of a patch].
    grid: their positions, as the processor writes them.
    """

    digest: bytes
    patches: bytes
    grid: tuple[int, ...]


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
