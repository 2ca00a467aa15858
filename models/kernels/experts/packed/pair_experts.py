"""Products of single pairs of a token and an expert of 4 bits on Hopper; see pair_kernel."""

from functools import lru_cache

import torch

from models.kernels.experts.packed.expert_product import ExpertProduct, ProductShape
from models.kernels.experts.packed.matrix_experts import words_of
from models.kernels.experts.packed.pair_kernel import pair_kernel
from models.kernels.launching.dependent_launch import launch_options
from models.kernels.launching.launch import Launch

_NUM_WARPS = 8
_ROWS = 16
_SHORT_INPUTS = 1024
_SHORT_ROWS = 32
"""Rows of a program, more of them where its warps have one step of 128 inputs each, at most.

Measured with one token of gpt-oss-20b (H100, 2026-11): 30.3 us a layer; 31.2 with gate and up in 4
warps, 30.9 with them in 32 rows, 32.1 with down in 4 warps. Products of Qwen3-30B-A3B in groups of
128 (H100, 2026-11-26), 4 tokens: with 2048 inputs 21.8 us, in 4 warps 23.4, in 32 rows 23.6; with
768 inputs 13.4 in 32 rows, 15.0 in 16. One token of Kimi-K2 in groups of 32, 2048 inputs: 27.4, in
32 rows 28.2.
"""


def pair_product(product: ExpertProduct) -> None:
    """Computes a product into its output.

    Each pair reads its expert, which the second-level cache may have.
    """
    shape = product.shape
    outputs = _rows(shape) // (2 if shape.is_gated else 1)
    words, group = words_of(product.scale)
    scale = product.scale if group is None else words
    _launcher(shape, group, scale.shape[-1], product.device)(
        (len(product.output), -(-shape.num_outputs // outputs), 1),
        product.weight.view(torch.int32), product.x, scale, product.bias, product.ids,
        product.output, product.alpha, product.limit,
    )  # fmt: skip


def _rows(shape: ProductShape) -> int:
    return _SHORT_ROWS if shape.num_inputs <= _SHORT_INPUTS else _ROWS


@lru_cache
def _launcher(shape: ProductShape, group: int | None, each: int, device: torch.device) -> Launch:
    return Launch(
        pair_kernel, GROUP=group, EACH=each, ROWS=_rows(shape), num_warps=_NUM_WARPS,
        **shape.constants, **launch_options(device),
    )  # fmt: skip
