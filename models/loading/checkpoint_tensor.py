"""A tensor of a checkpoint, as the loader takes it from files of any format."""

from dataclasses import dataclass
from pathlib import Path

import torch

from models.loading.gguf_joined import Code


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or does not fit the model its config describes."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One stored tensor, on the CPU and backed by its memory-mapped file."""

    file: Path
    name: str
    values: torch.Tensor
    """The stored values; rows of bytes where there is a code."""
    code: Code | None = None
    """How they become the tensor's values; None: they are these."""
    second: torch.Tensor | None = None
    """The other part of a joined tensor."""

    @property
    def module(self) -> str:
        """Its module by the checkpoint's name, which is what quantization_config writes."""
        return self.name.rpartition(".")[0]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All stored values, for the code."""
        return (self.values,) if self.second is None else (self.values, self.second)
