"""The values of a checkpoint's tensor that a GGUF file has in parts; see models.gguf.joined."""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from models.gguf.joined import Layout
from models.loading.dequantize import rounded_to_fp8
from models.loading.gguf_code import GgufCode


@dataclass(frozen=True, slots=True)
class JoinedCode:
    """The codes of the parts, and how they are joined."""

    parts: tuple[GgufCode, ...]
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the decoded tensor."""
        shapes = [torch.empty(part.shape, device="meta") for part in self.parts]
        return tuple(self._joined(shapes).shape)

    @property
    def stored_as(self) -> str:
        """The types of the parts."""
        return " and ".join(sorted({part.stored_as for part in self.parts}))

    def decode(self, *stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the values, of `dtype`."""
        each = zip(self.parts, stored, strict=True)
        return self._joined([code.decode(part, dtype=dtype) for code, part in each])

    def _joined(self, values: list[torch.Tensor]) -> torch.Tensor:
        if self.layout == "key_value_heads":
            keys, head_values = values
            return torch.cat((keys.transpose(1, 2), head_values), dim=1).flatten(0, 1)
        if self.layout == "gate_up":
            joined = torch.stack(values, dim=2).flatten(1, 2)
        else:
            [joined] = values
        return joined.transpose(1, 2) if joined.dim() == 3 else joined


Code: TypeAlias = GgufCode | JoinedCode


def rounded_code(*stored: torch.Tensor, code: Code, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values that FP8 with scales by row keeps, of `dtype`."""
    return rounded_to_fp8(code.decode(*stored, dtype=torch.float32), dtype)
