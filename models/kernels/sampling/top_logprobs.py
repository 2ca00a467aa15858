"""Log-probabilities in two kernels: one reads every logit, one works on its result."""

import torch
import triton
import triton.language as tl

from models.kernels.sampling.group_maxima import GROUP, group_maxima_and_sums


@triton.jit(do_not_specialize=["token_ids_ptr", "num_top"])
def _top_logprobs_kernel(
    logits_ptr, maxima_ptr, sums_ptr, token_ids_ptr, chosen_ptr, top_ids_ptr, top_ptr, num_top,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Does one row. Each round takes the best token left, from the group with the best maximum."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * SIZE
    groups = tl.arange(0, BLOCK)
    exists = groups < GROUPS
    maxima = tl.load(maxima_ptr + row * GROUPS + groups, mask=exists, other=float("-inf"))
    sums = tl.load(sums_ptr + row * GROUPS + groups, mask=exists, other=0.0)
    largest = tl.max(maxima, 0)
    log_total = tl.log(tl.sum(sums * tl.exp(maxima - largest), 0)) + largest
    chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(chosen_ptr + row, chosen - log_total)
    last = tl.full((), float("inf"), tl.float32)
    last_id = tl.full((), -1, tl.int32)
    for rank in range(num_top):
        best = tl.max(maxima, 0)
        group = tl.min(tl.where(maxima == best, groups, BLOCK), 0)
        tokens = group * GROUP + tl.arange(0, GROUP)
        logits = tl.load(logits_ptr + tokens, mask=tokens < SIZE, other=float("-inf"))
        logits = logits.to(tl.float32)
        is_left = (logits < last) | ((logits == last) & (tokens > last_id))
        # Of broken logits none is the best, yet the token must exist.
        last_id = tl.min(tl.where(is_left & (logits == best), tokens, SIZE - 1), 0)
        last = best
        is_left &= (logits < last) | (tokens > last_id)
        left = tl.max(tl.where(is_left, logits, float("-inf")), 0)
        maxima = tl.where(groups == group, left, maxima)
        tl.store(top_ids_ptr + row * num_top + rank, last_id.to(tl.int64))
        tl.store(top_ptr + row * num_top + rank, best - log_total)


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns [S], [S, n] and [S, n] of contiguous logits; see models.ops.sampling.top_logprobs."""
    num_rows, size = logits.shape
    maxima, sums = group_maxima_and_sums(logits)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device)
    num_groups = maxima.shape[1]
    _top_logprobs_kernel[(num_rows,)](
        logits, maxima, sums, token_ids, chosen, top_ids, top, num_top,
        SIZE=size, GROUPS=num_groups, GROUP=GROUP, BLOCK=triton.next_power_of_2(num_groups),
        num_warps=4,
    )  # fmt: skip
    return chosen, top_ids, top
