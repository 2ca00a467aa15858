"""Low-rank adapters: octavo::add_adapters and octavo::add_embedding_adapters.

Each token may have another adapter. All adapters of a step are computed in one call.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from models.batch_invariance import row_wise
from models.forward_context import slots_of_step
from models.kernels.gpu import has_kernels
from models.ops.custom_op import direct_register_custom_op


def _add_adapters(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
) -> torch.Tensor:
    """Returns a product with that of each token's adapter added: product + x @ A^T @ B^T.

    T tokens, K inputs, N outputs in P parts, S adapters of up to R ranks. The forward context has
    the slot of each token's adapter. Sums are computed in float32 or wider.

    Args:
        product: [T, N].
        x: [T, K], the inputs of the product.
        adapter_a: [S, P * R, K], a matrix A for each part.
        adapter_b: [S, N, R], scaled.
        part_sizes: outputs of each part.

    Returns:
        [T, N], a new tensor; the product itself in a step without adapters. Compiled programs of
        such steps do not call it.

    Source: Hu et al. 2021, "LoRA", section 4.1.
    """
    slots = slots_of_step()
    if slots is None:
        return product
    return add_slots(product, x, adapter_a, adapter_b, part_sizes, slots)


def add_slots(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Does the same with the slot of each token, [at least T] int32: 0 for none, n + 1 for n."""
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.products import add_adapters as kernel

        added: torch.Tensor = kernel.add_adapters(
            product, x, adapter_a, adapter_b, part_sizes, slots
        )
        return added

    def add(product: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return _reference(product, x, adapter_a, adapter_b, part_sizes, slots)

    return row_wise(add, product, x, slots[: len(x)])


def _reference(
    product: torch.Tensor,
    x: torch.Tensor,
    adapter_a: torch.Tensor,
    adapter_b: torch.Tensor,
    part_sizes: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    output = product.clone()
    exact = torch.promote_types(x.dtype, torch.float32)
    rank = adapter_b.shape[2]
    for slot in set(slots.tolist()):
        if not slot:
            continue
        tokens = (slots == slot).nonzero().squeeze(1)
        inner = x[tokens].to(exact) @ adapter_a[slot - 1].to(exact).T
        weight = adapter_b[slot - 1].to(exact)
        ends = [0, *accumulate(part_sizes)]
        added = torch.cat(
            [
                inner[:, part * rank : (part + 1) * rank] @ weight[first:end].T
                for part, (first, end) in enumerate(pairwise(ends))
            ],
            dim=1,
        )
        output[tokens] = (product[tokens].to(exact) + added).to(product.dtype)
    return output


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
        [T, H], a new tensor, or the vectors themselves as for `add_adapters`.
    """
    slots = slots_of_step()
    if slots is None:
        return vectors
    slots = slots[: len(token_ids)]
    _, num_tokens, rank = adapter_a.shape
    local_ids = token_ids - first
    is_own = (slots > 0) & (local_ids >= 0) & (local_ids < num_tokens)
    rows = ((slots.long() - 1) * num_tokens + local_ids).masked_fill(~is_own, 0)
    inner = adapter_a.view(-1, rank).index_select(0, rows).masked_fill(~is_own.unsqueeze(1), 0)
    return add_slots(vectors, inner, identity, adapter_b, (vectors.shape[1],), slots)


def _fake_like_first(product: torch.Tensor, *others: object) -> torch.Tensor:
    del others
    return torch.empty_like(product)


add_adapters = direct_register_custom_op("add_adapters", _add_adapters, (), _fake_like_first)
add_embedding_adapters = direct_register_custom_op(
    "add_embedding_adapters", _add_embedding_adapters, (), _fake_like_first
)
