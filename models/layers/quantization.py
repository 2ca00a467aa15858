"""The formats in which a linear layer keeps its weight, and their products."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from models.kernels.gpu import HOPPER, gpu_of, is_hopper
from models.layers.weight import ShardId
from models.number_formats import BLOCK, FP8, MXFP4_RUN, NVFP4_RUN
from models.operands.packed_weights import RUN
from models.ops.products.adapted_linear import adapted_linear
from models.ops.products.add_adapters import add_adapters
from models.ops.products.linear import linear
from models.ops.products.packed_linear import packed_linear

SCALED_MM_MULTIPLE = 16
"""torch._scaled_mm needs both sizes of a weight to be a multiple of this."""

PackedKind = Literal["int4", "int8", "mxfp4", "nvfp4"]
FLOAT_GROUPS: dict[PackedKind, int] = {"mxfp4": MXFP4_RUN, "nvfp4": NVFP4_RUN}
"""Columns of 4-bit floats that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a weight of 4 or 8 bits is kept; models.operands.packed_weights has the layouts.

    has_order: the columns of the weight are sorted by group, and the inputs are before each
    product.
    """

    kind: PackedKind
    group: int | None
    """Columns of a row that share a scale; None: the whole row."""
    has_zeros: bool = False
    has_order: bool = False

    def describe(self) -> str:
        """Returns the format in words of the field, such as "int4 groups of 128"."""
        if not self.is_integer:
            return self.kind
        groups = f"groups of {self.group}" if self.group else "rows"
        zeros = ", zero points" if self.has_zeros else ""
        return f"{self.kind} {groups}{zeros}{', ordered' if self.has_order else ''}"

    @property
    def is_integer(self) -> bool:
        """Whether the numbers are integers, not floats."""
        return self.kind not in FLOAT_GROUPS

    @property
    def per_byte(self) -> int:
        """Numbers in a byte."""
        return 1 if self.kind == "int8" else 2


@dataclass(frozen=True)
class LinearMethod:
    """How a linear layer multiplies with its weight."""

    product: Callable[["QuantizableLinear", torch.Tensor, torch.Tensor | None], torch.Tensor]
    """Maps a layer, x [T, K] and bias [N] to [T, N]."""
    kept_as: str | None = None
    """The weight's format in words; None: its dtype says it."""
    block: int | None = None
    """Rows and columns of the weight that share a scale; None: a row does, if there are scales."""
    packing: Packing | None = None
    """Of a weight of 4 bits, or of integers of 8."""


class QuantizableLinear(nn.Module, ABC):
    """A linear layer whose weight format can be changed.

    Parameters whose names begin with `weight_` belong to the weight.
    """

    method: LinearMethod
    weight: nn.Parameter
    weight_scale: nn.Parameter | None
    weight_zero: nn.Parameter | None
    """Of packed integers: zero points [N, K / group], uint8 or int8."""
    weight_order: nn.Parameter | None
    """The input of each column, [K] int32; None: the first of the first, and so on."""
    adapter_a: torch.Tensor | None
    """Room for low-rank adapters: [slots, parts * R, K]; None without any."""
    adapter_b: torch.Tensor | None
    """Their other factor, scaled: [slots, N, R]."""

    def __init__(self) -> None:
        super().__init__()
        self.method = UNQUANTIZED
        self.weight_scale = None
        self.weight_zero = None
        self.weight_order = None
        self.register_buffer("adapter_a", None, persistent=False)
        self.register_buffer("adapter_b", None, persistent=False)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Maps x [T, K] to [T, N], this rank's inputs and outputs, with each token's adapter."""
        if self.adapter_a is None or self.adapter_b is None:
            return self.method.product(self, x, bias)
        adapters = self.adapter_a, self.adapter_b, self.part_sizes
        if self.method.packing is None:
            return adapted_linear(x, self.weight, bias, self.weight_scale, *adapters, False)
        return add_adapters(self.method.product(self, x, bias), x, *adapters)

    @property
    @abstractmethod
    def part_sizes(self) -> tuple[int, ...]:
        """This rank's outputs of each projection in the layer."""

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """This rank's inputs."""

    @abstractmethod
    def parts_of(self, shard_id: ShardId, num_rows: int) -> Sequence[int]:
        """Returns the projections that a stored tensor of `num_rows` rows holds."""

    @abstractmethod
    def local_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of values for each input, [n, all inputs].

        Raises:
            ValueError: they are of another number of inputs.
        """

    @property
    @abstractmethod
    def has_all_inputs(self) -> bool:
        """Whether the layer multiplies all inputs, not one rank's share."""

    @abstractmethod
    def is_split_at(self, multiple: int) -> bool:
        """Returns whether shards and packed parts begin at multiples of `multiple` features."""

    def columns_per_entry(self, param: nn.Parameter) -> int | None:
        """Returns the columns of the weight that an entry of a parameter's row describes.

        None: the whole row, or the parameter has no rows.
        """
        packing = self.method.packing
        if param is self.weight:
            return 1 if packing is None else packing.per_byte
        if param is self.weight_scale:
            return self.method.block if packing is None else packing.group
        return packing.group if packing is not None and param is self.weight_zero else None


def can_run_fp8(device: torch.device) -> bool:
    """Returns whether the device multiplies 8-bit floats: Hopper and later."""
    return device.type == "cuda" and gpu_of(device).capability >= HOPPER


def can_run_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the device has kernels that unpack weights: Hopper, for bfloat16."""
    return is_hopper(device) and dtype is torch.bfloat16


def fits_fp8(layer: QuantizableLinear, block_size: tuple[int, int] | None) -> bool:
    """Returns whether a layer with such scales can use FP8 products."""
    if block_size is None:
        return not any(size % SCALED_MM_MULTIPLE for size in layer.weight.shape)
    return block_size == (BLOCK, BLOCK) and layer.is_split_at(BLOCK)


def fits_packed(layer: QuantizableLinear, packing: Packing) -> bool:
    """Returns whether a layer, or one rank's share of it, can keep a packed weight."""
    num_columns, group = layer.weight.shape[1], packing.group
    if num_columns % RUN or (packing.has_order and not layer.has_all_inputs):
        return False
    if not packing.is_integer:
        return group == FLOAT_GROUPS[packing.kind]
    return group is None or not (group % RUN or num_columns % group)


def use_fp8(layer: QuantizableLinear, block_size: tuple[int, int] | None) -> None:
    """Makes a layer keep and multiply its weight in FP8; call before it has values.

    block_size: rows and columns of the weight that share a scale; None: one scale per row.
    """
    num_rows, num_columns = layer.weight.shape
    if block_size is None:
        layer.method, shape = FP8_ROWS, (num_rows, 1)
    else:
        layer.method, shape = FP8_BLOCKS, (-(-num_rows // BLOCK), -(-num_columns // BLOCK))
    layer.weight = _empty_like(layer, (num_rows, num_columns), FP8)
    layer.weight_scale = _empty_like(layer, shape, torch.float32)


def use_packed(layer: QuantizableLinear, packing: Packing) -> None:
    """Makes a layer keep and multiply its weight as it is packed; call before it has values."""
    num_rows, num_columns = layer.weight.shape
    groups = num_rows, num_columns // (packing.group or num_columns)
    scale_dtype = torch.uint8 if packing.kind == "mxfp4" else torch.bfloat16
    layer.method = LinearMethod(_packed_product, packing.describe(), packing=packing)
    weight_dtype = torch.int8 if packing.kind == "int8" else torch.uint8
    layer.weight = _empty_like(layer, (num_rows, num_columns // packing.per_byte), weight_dtype)
    layer.weight_scale = _empty_like(layer, groups, scale_dtype)
    if packing.has_zeros:
        layer.weight_zero = _empty_like(layer, groups, weight_dtype)
    if packing.has_order:
        layer.weight_order = _empty_like(layer, (num_columns,), torch.int32)


def _empty_like(
    layer: QuantizableLinear, shape: tuple[int, ...], dtype: torch.dtype
) -> nn.Parameter:
    values = torch.empty(shape, dtype=dtype, device=layer.weight.device)
    return nn.Parameter(values, requires_grad=False)


def _product(layer: QuantizableLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, layer.weight, bias, layer.weight_scale)


def _packed_product(
    layer: QuantizableLinear, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    assert layer.weight_scale is not None, "use_packed gave it one"
    if layer.weight_order is not None:
        x = x.index_select(1, layer.weight_order)
    return packed_linear(x, layer.weight, layer.weight_scale, layer.weight_zero, bias, False)


UNQUANTIZED = LinearMethod(_product)
FP8_ROWS = LinearMethod(_product, "fp8 rows")
FP8_BLOCKS = LinearMethod(_product, f"fp8 blocks of {BLOCK} x {BLOCK}", block=BLOCK)
