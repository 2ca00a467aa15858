"""How the stored bytes of a GGUF tensor become the values of a checkpoint's tensor."""

from dataclasses import dataclass

import torch

from models.gguf.tensor_types import TensorType
from models.loading.gguf_blocks import dequantize


@dataclass(frozen=True, slots=True)
class GgufCode:
    """The code of one tensor, or of one expert's part of a stacked one."""

    type: TensorType
    shape: tuple[int, ...]
    """Sizes of the decoded tensor."""
    paired_heads: int = 0
    """See `models.gguf.tensors.Source`."""
    is_offset: bool = False
    """Whether 1 was added to the values."""

    @property
    def stored_as(self) -> str:
        """The name of the type."""
        return self.type.name

    @property
    def is_plain(self) -> bool:
        """Whether the stored values are those of the tensor."""
        return self.type.block_size == 1 and not self.paired_heads and not self.is_offset

    def decode(self, stored: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values, of `dtype`.

        stored: rows of blocks as uint8, or plain values.
        """
        stored = self.in_order(stored)
        if self.type.block_size > 1:
            return dequantize(stored, self.type, dtype)
        return (stored.float() - 1).to(dtype) if self.is_offset else stored.to(dtype)

    def in_order(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the order of the checkpoint, where halves of a head are apart."""
        if not self.paired_heads:
            return stored
        pairs = stored.reshape(self.paired_heads, -1, 2, *stored.shape[1:])
        return pairs.transpose(1, 2).reshape(stored.shape)
