"""The formats in which a linear layer keeps its weight, and their products."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from models.number_formats import BLOCK, FP8
from models.ops.kernel_choice import HOPPER
from models.ops.linear.linear import linear

SCALED_MM_MULTIPLE = 16
"""torch._scaled_mm needs both sizes of a weight to be a multiple of this."""


@dataclass(frozen=True)
class LinearMethod:
    """How a linear layer multiplies with its weight."""

    product: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
    ]
    """Maps x [T, K], weight [N, K], the weight's scale and bias [N] to [T, N]."""
    block: int | None = None
    """Rows and columns of the weight that share a scale; None: a row does, if there are scales."""


class QuantizableLinear(nn.Module, ABC):
    """A linear layer whose weight format can be changed."""

    method: LinearMethod
    weight: nn.Parameter
    weight_scale: nn.Parameter | None

    @abstractmethod
    def is_split_at(self, multiple: int) -> bool:
        """Returns whether shards and packed parts begin at multiples of `multiple` features."""


def can_run_fp8(device: torch.device) -> bool:
    """Returns whether the device multiplies 8-bit floats: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def fits_fp8(layer: QuantizableLinear, block_size: tuple[int, int] | None) -> bool:
    """Returns whether a layer with such scales can use FP8 products."""
    if block_size is None:
        return not any(size % SCALED_MM_MULTIPLE for size in layer.weight.shape)
    return block_size == (BLOCK, BLOCK) and layer.is_split_at(BLOCK)


def use_fp8(layer: QuantizableLinear, block_size: tuple[int, int] | None) -> None:
    """Makes a layer keep and multiply its weight in FP8; call before it has values.

    block_size: rows and columns of the weight that share a scale; None: one scale per row.
    """
    num_rows, num_columns = layer.weight.shape
    if block_size is None:
        layer.method, shape = FP8_ROWS, (num_rows, 1)
    else:
        layer.method, shape = FP8_BLOCKS, (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
    weight = torch.empty(num_rows, num_columns, dtype=FP8, device=layer.weight.device)
    scale = torch.empty(shape, dtype=torch.float32, device=layer.weight.device)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    return linear(x, weight, bias, scale)


UNQUANTIZED = LinearMethod(_product)
FP8_ROWS = LinearMethod(_product)
FP8_BLOCKS = LinearMethod(_product, block=BLOCK)
