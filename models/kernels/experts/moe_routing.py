"""Chooses experts for tokens, and sorts tokens by expert."""

import torch
import triton
import triton.language as tl

from models.kernels.experts.expert_forms import TILE_ROWS, tile_rows
from models.kernels.experts.many_pairs import sort_many_pairs
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.operands.experts import Routing

_PAIRS_AT_ONCE = 1024
"""Pairs that a program of _sort_kernel reads at once."""


@triton.jit
def _own_slots(
    chosen, is_used, token, map_ptr, load_ptr, counts_ptr, num_rows,
    NUM_RANKS: tl.constexpr, NUM_LOCAL: tl.constexpr, HAS_COUNTS: tl.constexpr,
):  # fmt: skip
    """Counts a token's experts and maps them to this rank's slots; NUM_LOCAL for no slot."""
    if HAS_COUNTS:
        is_used = is_used & (token % num_rows < tl.load(counts_ptr + token // num_rows))
    tl.atomic_add(load_ptr + chosen, is_used.to(tl.int64), mask=is_used)
    chosen = tl.load(map_ptr + chosen * NUM_RANKS + (token % NUM_RANKS).to(tl.int32))
    if HAS_COUNTS:
        chosen = tl.where(is_used, chosen, NUM_LOCAL)
    return chosen


@triton.jit(do_not_specialize=["logits_stride", "num_rows"])
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, map_ptr, load_ptr, counts_ptr, logits_stride,
    num_rows, scaling,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_NORMED: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, NUM_RANKS: tl.constexpr, NUM_LOCAL: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    logits = tl.load(
        logits_ptr + token * logits_stride + experts, mask=is_expert, other=float("-inf")
    ).to(tl.float32)
    if IS_SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        exponentials = tl.exp(logits - tl.max(logits, 0))
        scores = exponentials / tl.sum(exponentials, 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
    choice = tl.where(is_expert, choice, float("-inf"))
    if NUM_GROUPS > 1:
        group_of = experts // (NUM_EXPERTS // NUM_GROUPS)
        groups = tl.arange(0, BLOCK_G)
        group_scores = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for group in tl.static_range(NUM_GROUPS):
            members = tl.where(group_of == group, choice, float("-inf"))
            score = tl.max(members, 0)
            if HAS_BIAS:
                second = tl.where(experts == tl.argmax(members, 0), float("-inf"), members)
                score += tl.max(second, 0)
            group_scores = tl.where(groups == group, score, group_scores)
        is_open = experts < 0
        for _ in tl.static_range(TOP_GROUPS):
            best_group = tl.argmax(group_scores, 0)
            is_open = is_open | (group_of == best_group)
            group_scores = tl.where(groups == best_group, float("-inf"), group_scores)
        choice = tl.where(is_open, choice, float("-inf"))
    slots = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for slot in tl.static_range(TOP_K):
        # If all logits are NaN, padding may win, and there is no such expert.
        best = tl.minimum(tl.argmax(choice, 0), NUM_EXPERTS - 1)
        chosen = tl.where(slots == slot, best, chosen)
        weight = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        weights = tl.where(slots == slot, weight, weights)
        choice = tl.where(experts == best, float("-inf"), choice)
    if IS_NORMED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if NUM_RANKS > 1:
        chosen = _own_slots(
            chosen, slots < TOP_K, token, map_ptr, load_ptr, counts_ptr, num_rows,
            NUM_RANKS, NUM_LOCAL, HAS_COUNTS,
        )  # fmt: skip
        weights = tl.where(chosen < NUM_LOCAL, weights, 0.0)
    at = token * TOP_K + slots
    tl.store(weights_ptr + at, weights * scaling, mask=slots < TOP_K)
    tl.store(experts_ptr + at, chosen, mask=slots < TOP_K)


def route(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    routing: Routing,
    expert_map: torch.Tensor | None = None,
    expert_load: torch.Tensor | None = None,
    num_local: int = 0,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what models.ops.experts.moe.route does, with int32 ids. Rows of logits are contiguous.

    With an expert_map, [E, ranks] int32, and expert_load, [E] int64, it counts the chosen experts,
    and ids are this rank's slots; num_local stands for other ranks' slots, whose weight is 0. With
    counts, [R] int32, the tokens are R equal runs of rows, of which the first counts[r] are used.
    """
    num_tokens, num_experts = logits.shape
    shape = (num_tokens, routing.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits, logits if correction_bias is None else correction_bias, weights, ids,
        logits if expert_map is None else expert_map,
        logits if expert_load is None else expert_load, logits if counts is None else counts,
        logits.stride(0), num_tokens if counts is None else num_tokens // len(counts),
        routing.scaling,
        NUM_EXPERTS=num_experts, TOP_K=routing.top_k, IS_SIGMOID=routing.is_sigmoid,
        HAS_BIAS=correction_bias is not None, IS_NORMED=routing.is_normed,
        NUM_GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
        NUM_RANKS=1 if expert_map is None else expert_map.shape[1], NUM_LOCAL=num_local,
        HAS_COUNTS=counts is not None,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(routing.top_k),
        BLOCK_G=triton.next_power_of_2(routing.num_groups), num_warps=1,
        **launch_options(logits.device),
    )  # fmt: skip
    return weights, ids


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr, pairs_ptr, starts_ptr, rows_ptr, num_pairs, NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the pairs of one expert, in order, after those of the experts before it.

    rows_ptr, unless None, takes the place of each of them.
    """
    let_next_start(DEPENDENT)
    wait_for_previous(DEPENDENT)
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + offsets
        ids = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        before += (ids < expert).to(tl.int32)
    end = tl.sum(before, 0)
    tl.store(starts_ptr + expert, end)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + offsets
        ids = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        is_own = (ids == expert).to(tl.int32)
        at = end + tl.cumsum(is_own, 0) - is_own
        tl.store(pairs_ptr + at, pairs, mask=is_own > 0)
        if rows_ptr is not None:
            tl.store(rows_ptr + pairs, at, mask=is_own > 0)
        end += tl.sum(is_own, 0)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts_ptr + NUM_EXPERTS, end)


def sort_by_expert(
    ids: torch.Tensor, num_experts: int, num_choices: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts pairs of a token and one of its experts by expert, on the device, in a fixed order.

    Pairs of other experts than the first num_experts are left out. num_choices: experts that tokens
    choose from. rows: takes the place of each pair, [T * top_k] int32.

    Returns:
        Pairs, [T * top_k] int32, as indices into flattened `ids`, [T, top_k] int32; and
        [num_experts + 1] int32, where each expert's pairs start.
    """
    num_pairs = ids.numel()
    is_many = tile_rows(num_pairs, num_choices) == TILE_ROWS[-1]
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    if is_many:
        sort_many_pairs(ids, num_experts, pairs, starts, rows)
        return pairs, starts
    _sort_kernel[(num_experts,)](
        ids, pairs, starts, rows, num_pairs, NUM_EXPERTS=num_experts, BLOCK=_PAIRS_AT_ONCE,
        num_warps=4, **launch_options(ids.device),
    )  # fmt: skip
    return pairs, starts
