"""FP8 experts on Hopper; fp8_expert_kernel describes how."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from models.kernels.experts.expert_forms import OF_8_BITS, are_few, tile_rows
from models.kernels.experts.fp8.fp8_expert_kernel import fp8_expert_kernel
from models.kernels.experts.fp8.fp8_rows import empty_row_scales, rounded_rows
from models.kernels.experts.moe_grouped import sum_by_token
from models.kernels.experts.moe_routing import sort_by_expert
from models.kernels.gpu import is_hopper, num_multiprocessors
from models.kernels.launching.copy_engine import COPY_ALIGNMENT
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch
from models.kernels.products.fp8.fp8_configurations import LEAST_SCALES
from models.kernels.products.fp8.fp8_operands import DTYPES, described_scales, described_tokens
from models.kernels.tuning.tiles import GROUP_ROWS
from models.number_formats import BLOCK, FP8
from models.operands.experts import ExpertWeights

_WEIGHT_LAYOUT = gl.NVMMASharedLayout(128, 8, rank=3)
_SHARED_BYTES = 226304
"""Shared memory of a program, less 6 KiB of what is not the ring's nor the results'."""
_MOST_SLOTS = 8
_REGISTERS = (232, 40)
"""Of a thread of the second group, and of the warp that loads."""
_ALONE_HEIGHT = 8
_TALL_HEIGHT = 128
"""Tokens of a tile that are the tensor cores' left factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A product that a kernel is built for.

    num_outputs: of gate and of up alone, or of each half of an expert's outputs.
    halves: of the matrix's rows, of both of which a tile has a block.
    height: tokens of a tile.
    """

    num_outputs: int
    num_inputs: int
    num_experts: int
    halves: int
    height: int
    is_gated: bool
    is_alone: bool
    is_clamped: int
    has_bias: bool
    by_row: bool
    dtype: torch.dtype


def takes_experts(experts: ExpertWeights) -> bool:
    """Returns whether apply_fp8_on_cores takes FP8 experts on their GPU."""
    sizes = experts.down.shape[1:]
    is_able = is_hopper(experts.down.device) and not experts.is_squared
    return is_able and not any(size % COPY_ALIGNMENT for size in sizes)


def apply_fp8_on_cores(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: ExpertWeights,
    output: torch.Tensor,
) -> None:
    """Does what models.kernels.experts.fp8.moe_fp8.apply_fp8 does."""
    num_pairs, num_experts, num_choices = ids.numel(), len(experts.down), experts.num_choices
    is_alone = are_few(num_pairs, num_choices, ids.shape[1], OF_8_BITS)
    pairs, starts, rows, height = ids, ids, ids, _ALONE_HEIGHT
    if not is_alone:
        rows = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
        pairs, starts = sort_by_expert(ids, num_experts, num_choices, rows)
        height = tile_rows(num_pairs, num_choices, OF_8_BITS)
    x, x_scale = rounded_rows(hidden, ids, starts, rows, num_experts, is_alone=is_alone)
    between = hidden.new_empty(num_pairs, experts.inner_size, dtype=FP8)
    between_scale = empty_row_scales(between, num_experts, is_alone=is_alone)
    gate_up, down = _products(experts, hidden, height, is_alone=is_alone)
    gate_up_bias, down_bias = experts.biases_or(weights)
    factors = experts.alpha, experts.limit or 0.0
    _multiply(
        gate_up, x, x_scale, experts.gate_up, experts.gate_up_scale, gate_up_bias, pairs, starts,
        between, between_scale, *factors,
    )  # fmt: skip
    del x, x_scale  # The results may take their memory.
    results = hidden.new_empty(num_pairs, hidden.shape[1])
    _multiply(
        down, between, between_scale, experts.down, experts.down_scale, down_bias, pairs, starts,
        results, None, *factors,
    )  # fmt: skip
    sum_by_token(results, weights, output, is_partial=experts.is_partial)


def _products(
    experts: ExpertWeights, hidden: torch.Tensor, height: int, *, is_alone: bool
) -> tuple[_Product, _Product]:
    """Returns the products of gate and up and of down."""
    num_experts, hidden_size, inner = experts.down.shape
    gate_up = _Product(
        num_outputs=inner, num_inputs=hidden_size, num_experts=num_experts, halves=2,
        height=height, is_gated=True, is_alone=is_alone, is_clamped=experts.clamp,
        has_bias=experts.gate_up_bias is not None, by_row=experts.is_scaled_by_row,
        dtype=hidden.dtype,
    )  # fmt: skip
    # Alone, there are few tiles; halves of scaled rows must be whole blocks.
    halves = 1 if is_alone or hidden_size % (2 * BLOCK) else 2
    num_outputs = hidden_size // halves
    down = replace(
        gate_up, num_outputs=num_outputs, num_inputs=inner, halves=halves, is_gated=False
    )
    return gate_up, down


def _multiply(
    product: _Product,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor,
    pairs: torch.Tensor,
    starts: torch.Tensor,
    output: torch.Tensor,
    output_scale: torch.Tensor | None,
    alpha: float,
    limit: float,
) -> None:
    """Runs the kernel."""
    num_rows, height = len(x), product.height
    box = min(height, GROUP_ROWS)
    num_tiles = num_rows if product.is_alone else num_rows // height + product.num_experts
    num_tiles *= triton.cdiv(product.num_outputs, BLOCK)
    _launcher(product, x.device)(
        (min(num_multiprocessors(x.device), num_tiles), 1, 1),
        described_tokens(x, box), described_scales(x_scale.t(), max(LEAST_SCALES, box)),
        _described_weight(weight, product), scale, bias, pairs, starts, output, output_scale,
        num_rows, 0 if output_scale is None else output_scale.stride(0), alpha, limit,
    )  # fmt: skip


def _described_weight(weight: torch.Tensor, product: _Product) -> TensorDescriptor:
    """Describes experts' matrices to the copy engine, in tiles of both halves."""
    num_outputs, num_inputs = product.num_outputs, product.num_inputs
    return TensorDescriptor(
        weight,
        [product.num_experts * product.halves, num_outputs, num_inputs],
        [num_outputs * num_inputs, num_inputs, 1],
        [product.halves, BLOCK, BLOCK],
        _WEIGHT_LAYOUT,
    )


@lru_cache
def _launcher(product: _Product, device: torch.device) -> Launch:
    height, num_blocks = product.height, triton.cdiv(product.num_inputs, BLOCK)
    table = BLOCK if product.by_row else max(32, triton.next_power_of_2(num_blocks))
    group_registers, load_registers = _REGISTERS
    return Launch(
        fp8_expert_kernel, NUM_OUTPUTS=product.num_outputs, NUM_INPUTS=product.num_inputs,
        NUM_EXPERTS=product.num_experts, HALVES=product.halves, IS_GATED=product.is_gated,
        IS_ALONE=product.is_alone, IS_CLAMPED=product.is_clamped, HAS_BIAS=product.has_bias,
        BY_ROW=product.by_row, TOKENS=height, TOKEN_AXIS=0 if height == _TALL_HEIGHT else 1,
        TABLE=table, SLOTS=_num_slots(product),
        BLOCK_E=max(32, triton.next_power_of_2(product.num_experts)),
        DTYPE=DTYPES[product.dtype], GROUP_REGISTERS=group_registers,
        LOAD_REGISTERS=load_registers, num_warps=4, **launch_options(device),
    )  # fmt: skip


def _num_slots(product: _Product) -> int:
    """Returns the slots of the ring that fit beside the results of both groups."""
    height = product.height
    itemsize = 1 if product.is_gated else product.dtype.itemsize
    # Numbers of up to 16 bits pass through half of the memory of a tall tile, one after the other.
    rows = height if itemsize == 4 else min(height, GROUP_ROWS)
    results = 2 * rows * GROUP_ROWS * itemsize
    slot = (product.halves * BLOCK + height) * BLOCK + max(LEAST_SCALES, height) * 4 + 16
    return max(2, min(_MOST_SLOTS, (_SHARED_BYTES - results) // slot))
