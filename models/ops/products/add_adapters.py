"""Low-rank adapters: octavo::shrink_adapters, expand_adapters and add_embedding_adapters.

Each token may have another adapter. All adapters of a step are computed in one call.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.ops.custom_op import direct_register_custom_op


def _shrink_adapters(x: torch.Tensor, adapter_a: torch.Tensor) -> torch.Tensor:
    """Returns the inputs of a layer times its tokens' matrices A.

    Layers call it before their own product, which it runs beside.

    Args:
        x: [T, K].
        adapter_a: [S, P * R, K], a matrix A for each part of the outputs.

    Returns:
        Addends [n, T, P * R] of x @ A^T, float32 or wider, for `expand_adapters`; undefined for
        tokens without an adapter, and empty in a step without any.
    """
    slots = get_forward_context().adapter_slots
    if slots is None:
        return x.new_empty(0)
    return shrink_slots(x, adapter_a, slots)


def _expand_adapters(
    product: torch.Tensor,
    inner: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
) -> torch.Tensor:
    """Returns a product with that of each token's adapter added: product + x @ A^T @ B^T.

    T tokens, K inputs, N outputs in P parts, S adapters of up to R ranks. The forward context has
    the slot of each token's adapter. Sums are computed in float32 or wider.

    Args:
        product: [T, N].
        inner: the result of `shrink_adapters`.
        adapter_b: [S, N, R], scaled.
        part_sizes: outputs of each part.

    Returns:
        [T, N], a new tensor; the product itself in a step without adapters. Compiled programs of
        such steps do not call it.

    Source: Hu et al. 2021, "LoRA", section 4.1.
    """
    slots = get_forward_context().adapter_slots
    if slots is None:
        return product
    return expand_slots(product, inner, adapter_b, part_sizes, slots)


def add_slots(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Adds x @ A^T @ B^T with the slot of each token, [at least T] int32.

    0 is for no adapter, n + 1 for the one in slot n.
    """
    inner = shrink_slots(x, adapter_a, slots)
    return expand_slots(product, inner, adapter_b, part_sizes, slots)


def shrink_slots(x: torch.Tensor, adapter_a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Computes `shrink_adapters` with the slot of each token."""
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.products import add_adapters as kernel

        inner: torch.Tensor = kernel.shrink_adapters(x, adapter_a, slots)
        return inner
    exact = torch.promote_types(x.dtype, torch.float32)
    inner = x.new_zeros((1, len(x), adapter_a.shape[1]), dtype=exact)
    for slot, tokens in _tokens_by_slot(slots[: len(x)]):
        inner[0, tokens] = x[tokens].to(exact) @ adapter_a[slot].to(exact).T
    return inner


def expand_slots(
    product: torch.Tensor,
    inner: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Computes `expand_adapters` with the slot of each token."""
    if has_kernels(product.device):
        from models.kernels.products import add_adapters as kernel

        added: torch.Tensor = kernel.expand_adapters(product, inner, adapter_b, part_sizes, slots)
        return added
    output = product.clone()
    rank = adapter_b.shape[2]
    ends = [0, *accumulate(part_sizes)]
    for slot, tokens in _tokens_by_slot(slots[: len(product)]):
        weight = adapter_b[slot].to(inner.dtype)
        sums = [
            inner[0, tokens, part * rank : (part + 1) * rank] @ weight[first:end].T
            for part, (first, end) in enumerate(pairwise(ends))
        ]
        exact = product[tokens].to(inner.dtype) + torch.cat(sums, dim=1)
        output[tokens] = exact.to(product.dtype)
    return output


def _tokens_by_slot(slots: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each adapter's slot, from 0 on, with the indices of its tokens."""
    for slot in set(slots.tolist()) - {0}:
        yield slot - 1, (slots == slot).nonzero().squeeze(1)


def _add_embedding_adapters(
    vectors: torch.Tensor,
    token_ids: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    identity: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Returns vectors of tokens with those of each token's adapter added.

    Args:
        vectors: [T, H].
        token_ids: [T] int32 or int64.
        adapter_a: [S, N, R], of the N tokens from `first` on; others have zeros.
        adapter_b: [S, H, R], scaled.
        identity: [S, R, R], S times the same.
        first: the id of the first token.

    Returns:
        [T, H], a new tensor, or the vectors as for `expand_adapters`.
    """
    slots = get_forward_context().adapter_slots
    if slots is None:
        return vectors
    slots = slots[: len(token_ids)]
    _, num_tokens, rank = adapter_a.shape
    local_ids = token_ids - first
    is_own = (slots > 0) & (local_ids >= 0) & (local_ids < num_tokens)
    rows = ((slots.long() - 1) * num_tokens + local_ids).masked_fill(~is_own, 0)
    inner = adapter_a.view(-1, rank).index_select(0, rows).masked_fill(~is_own.unsqueeze(1), 0)
    return add_slots(vectors, inner, identity, adapter_b, (vectors.shape[1],), slots)


def _fake_shrink_adapters(x: torch.Tensor, adapter_a: torch.Tensor) -> torch.Tensor:
    num_addends = 1
    if has_kernels(x.device):
        from models.kernels.products.add_adapters import num_splits

        num_addends = num_splits(x.shape[1], adapter_a.shape[1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((num_addends, x.shape[0], adapter_a.shape[1]), dtype=dtype)


def _fake_like_first(product: torch.Tensor, *others: object) -> torch.Tensor:
    del others
    return torch.empty_like(product)


shrink_adapters = direct_register_custom_op(
    "shrink_adapters", _shrink_adapters, (), _fake_shrink_adapters
)
expand_adapters = direct_register_custom_op(
    "expand_adapters", _expand_adapters, (), _fake_like_first
)
add_embedding_adapters = direct_register_custom_op(
    "add_embedding_adapters", _add_embedding_adapters, (), _fake_like_first
)
