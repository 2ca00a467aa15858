"""Low-rank adapters of a product, of all tokens and adapters of a step in two kernels.

Programs have a tile of neighbouring tokens. In decodes each token may have its own adapter. The
first kernel reads few rows of an adapter: a tile has several lanes, programs that share its
adapters, and the first token of each adapter chooses the lane. The second one multiplies with
several adapters at once: the values of a token are in the columns of its adapter, with zeros in the
others. So each reads the weights of an adapter once for a tile. No list of tokens by adapter is
made, and captured graphs need no other input than the slots.

Programs read weights and slots before the kernels ahead of them have ended; see dependent_launch.

Source of the grouping: Chen et al. 2023, "Punica", section 4; ours has no segments.
"""

from collections.abc import Sequence

import torch

from models.kernels.products.adapter_tiles import tiling_of
from models.kernels.products.expand_adapters import expand_form
from models.kernels.products.shrink_adapters import shrink_form


def add_adapters(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
    *,
    is_gated: bool = False,
    is_beside: bool = False,
) -> torch.Tensor:
    """Returns [T, N] of adapter_b's dtype; see models.ops.products.add_adapters.

    product: [T, N], or its addends [S, T, N].
    slots: another kernel that takes no part in dependent launches follows the one that wrote them.
    is_gated: returns silu(first half) * second half, [T, N / 2], of two equal parts.
    is_beside: the kernel before these two was the product's, with x as it is here, and was late.
    """
    x, product = x.contiguous(), product.contiguous()
    (num_tokens, num_inputs), num_outputs = x.shape, product.shape[-1]
    num_inner, rank = adapter_a.shape[1], adapter_b.shape[2]
    output = adapter_b.new_empty(num_tokens, num_outputs // (2 if is_gated else 1))
    if not num_tokens:
        return output
    tiling = tiling_of(num_tokens)
    shrink = shrink_form(num_inputs, num_inner, x.dtype, x.device, tiling, is_beside=is_beside)
    expand = expand_form(
        shrink.splits, rank, tuple(part_sizes), x.dtype, x.device, tiling,
        len(product) if product.dim() == 3 else 1, is_gated=is_gated,
    )  # fmt: skip
    inner = x.new_empty(shrink.splits, num_tokens, num_inner, dtype=torch.float32)
    shrink.launch(shrink.grid(num_tokens), x, adapter_a, slots, inner, num_tokens)
    expand.launch(expand.grid(num_tokens), product, inner, adapter_b, slots, output, num_tokens)
    return output
