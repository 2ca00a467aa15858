"""The kernels of experts in Triton's interpreter, on the CPU."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
from dataclasses import replace
from functools import partial
import torch
torch.set_num_threads(1)
from models.ops.experts import moe as reference
from models.kernels.experts import moe as kernels, token_chunks
from models.kernels.experts.moe_grouped import apply_grouped
from models.kernels.experts.moe_pairs import apply_pairs
from models.kernels.experts.moe_routing import sort_by_expert
from tests.support.moe_case import NUM_EXPERTS, ROUTINGS, exactly, make_experts, make_logits
from tests.support.tolerances import assert_rows_close

for routing in ROUTINGS.values():
    for num_tokens in (1, 13):
        logits, bias = make_logits(num_tokens, routing)
        weights, ids = reference.route(logits, bias, routing)
        actual_weights, actual_ids = kernels.route(logits, bias, routing)
        assert torch.equal(ids, actual_ids.long())
        torch.testing.assert_close(weights, actual_weights)
        pairs, starts = sort_by_expert(actual_ids, NUM_EXPERTS, NUM_EXPERTS)
        assert torch.equal(pairs.long(), ids.flatten().argsort(stable=True))
        counts = ids.flatten().bincount(minlength=NUM_EXPERTS)
        assert torch.equal(starts.diff().long(), counts)
routing = ROUTINGS["softmax"]
# Sizes that the copy engine takes, and others.
for dtype, is_clamped, hidden_size, inner in (
    (torch.float32, True, 36, 20), (torch.float16, False, 36, 20), (torch.float16, True, 72, 40)
):
    for num_tokens in (1, 5):
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        hidden = torch.randn(num_tokens, hidden_size).to(dtype)
        experts = make_experts(
            hidden=hidden_size, inner=inner, dtype=dtype, is_clamped=is_clamped
        )
        experts = replace(experts, adds_one=num_tokens > 1)
        exact = reference.apply_experts(hidden.double(), weights.double(), ids, exactly(experts))
        for apply in (apply_pairs, apply_grouped, partial(apply_grouped, is_alone=True)):
            actual = torch.empty_like(hidden)
            apply(hidden, weights, ids.int(), experts, actual)
            assert_rows_close(actual, exact)

# Chunks of tokens, as of a long step, compute what one chunk does.
token_chunks.CHUNK_MULTIPLE = 4
experts = make_experts(hidden=72, inner=40)
weights, ids = reference.route(*make_logits(13, routing), routing)
hidden = torch.randn(13, 72)
exact = reference.apply_experts(hidden.double(), weights.double(), ids, exactly(experts))
for most_tokens in (4, 8):
    token_chunks.MOST_SCRATCH_BYTES = most_tokens * token_chunks.scratch_bytes(
        1, top_k=3, itemsize=4, experts=experts
    )
    assert_rows_close(kernels.apply_experts(hidden, weights, ids.int(), experts), exact)
"""

MXFP4_PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.ops.experts import moe as reference
from models.kernels.experts.packed.moe_mxfp4 import apply_mxfp4
from tests.support.moe_case import ROUTINGS, exactly, make_logits, make_quantized_experts
from tests.support.tolerances import assert_rows_close

routing = ROUTINGS["softmax"]
# Sizes that no tile divides.
for hidden_size, inner, dtype, is_clamped in (
    (64, 96, torch.float32, True), (160, 32, torch.float16, False)
):
    experts = make_quantized_experts(
        "mxfp4", hidden=hidden_size, inner=inner, dtype=dtype, is_clamped=is_clamped
    )
    for num_tokens in (1, 5):
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        hidden = torch.randn(num_tokens, hidden_size).to(dtype)
        experts = replace(experts, adds_one=num_tokens > 1)
        exact = reference.apply_experts(
            hidden.double(), weights.double(), ids, exactly(experts)
        )
        actual = torch.empty_like(hidden)
        apply_mxfp4(hidden, weights, ids.int(), experts, actual)
        assert_rows_close(actual, exact)
"""

FP8_PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.ops.experts import moe as reference
from models.kernels.experts.fp8 import moe_fp8
from models.kernels.tuning.tiles import FP8ExpertTiles
from tests.support.interpreter_rounding import round_exactly
from tests.support.moe_case import ROUTINGS, exactly, make_logits, make_quantized_experts
from tests.support.tolerances import assert_rows_close

torch.manual_seed(0)
round_exactly()
routing = ROUTINGS["softmax"]
# Sizes that no tile and no block divides.
for kind, hidden_size, inner, dtype, is_clamped in (
    ("fp8", 136, 40, torch.float32, True),
    ("fp8", 40, 264, torch.float16, False),
    ("fp8-rows", 136, 200, torch.float32, True),
):
    experts = make_quantized_experts(
        kind, hidden=hidden_size, inner=inner, dtype=dtype, is_clamped=is_clamped
    )
    for num_tokens in (1, 5):
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        hidden = torch.randn(num_tokens, hidden_size).to(dtype)
        experts = replace(experts, adds_one=num_tokens > 1)
        exact = reference.apply_experts(
            hidden.double(), weights.double(), ids, exactly(experts), rounds_activations=True
        )
        actual = torch.empty_like(hidden)
        moe_fp8.apply_fp8(hidden, weights, ids.int(), experts, actual)
        # Rounded to a half before it is rounded to 8 bits, a number may become its neighbour there.
        assert_rows_close(actual, exact, 2**-5 if dtype == torch.float16 else None)
        # Tiles with whole runs of features round them in the first kernel, to the same bits.
        wide = FP8ExpertTiles(rows=16, columns=128, num_warps=4, num_stages=1)
        tiles_of, moe_fp8._fitted = moe_fp8._fitted, lambda *_: (wide, wide)
        again = torch.empty_like(hidden)
        moe_fp8.apply_fp8(hidden, weights, ids.int(), experts, again)
        assert torch.equal(again, actual)
        moe_fp8._fitted = tiles_of
"""

PARTIAL_PROGRAM = """
from functools import partial
import torch
torch.set_num_threads(1)
from models.ops.experts import moe as reference
from models.ops.experts.expert_parallel import own_slots
from models.kernels.experts import moe as kernels
from models.kernels.experts.fp8.moe_fp8 import apply_fp8
from models.kernels.experts.moe_grouped import apply_grouped
from models.kernels.experts.packed.moe_mxfp4 import apply_mxfp4
from models.kernels.experts.moe_pairs import apply_pairs
from models.parallel.expert_placement import ExpertPlacement
from tests.support.interpreter_rounding import round_exactly
from tests.support.moe_case import (
    NUM_EXPERTS, ROUTINGS, exactly, make_experts, make_logits, make_quantized_experts, part_of,
)
from tests.support.tolerances import assert_rows_close

round_exactly()
# What no kernel has written must not reach the sum.
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)
placement = ExpertPlacement.first(NUM_EXPERTS, 3, 2)
apply_alone = partial(apply_grouped, is_alone=True)
for name in ("softmax", "sigmoid-groups"):
    routing = ROUTINGS[name]
    for num_tokens in (1, 5):
        logits, bias = make_logits(num_tokens, routing)
        weights, ids = reference.route(logits, bias, routing)
        hidden = torch.randn(num_tokens, 64)
        cases = (
            (
                make_experts(hidden=64, inner=32, is_clamped=True),
                (apply_pairs, apply_grouped, apply_alone),
            ),
            (make_quantized_experts("mxfp4", hidden=64, inner=32), (apply_mxfp4,)),
            (make_quantized_experts("fp8", hidden=64, inner=32), (apply_fp8,)),
        )
        totals = {}
        for rank in range(placement.num_ranks):
            expert_map = torch.tensor(placement.expert_map(rank), dtype=torch.int32)
            load = torch.ones(NUM_EXPERTS, dtype=torch.int64)
            num_local = placement.num_local
            own_weights, slots = kernels.route(
                logits, bias, routing, expert_map, load, num_local
            )
            assert torch.equal(slots.long(), own_slots(ids, expert_map))
            assert torch.equal(load - 1, ids.flatten().bincount(minlength=NUM_EXPERTS))
            is_own = slots < num_local
            assert torch.equal(own_weights == 0, ~is_own)
            torch.testing.assert_close(own_weights[is_own], weights[is_own])
            for number, (experts, applied) in enumerate(cases):
                part = part_of(experts, placement.experts_of(rank))
                for apply in applied:
                    result = torch.empty_like(hidden)
                    apply(hidden, own_weights, slots, part, result)
                    key = number, apply
                    totals[key] = totals.get(key, 0) + result.double()
        for (number, apply), total in totals.items():
            exact = reference.apply_experts(
                hidden.double(), weights.double(), ids, exactly(cases[number][0]),
                rounds_activations=number == 2,
            )
            assert_rows_close(total.float(), exact)
routing = ROUTINGS["softmax"]
logits, bias = make_logits(6, routing)
_, ids = reference.route(logits, bias, routing)
is_token = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.bool)  # of 3 ranks with 2 rows each
counts = torch.tensor([2, 0, 1], dtype=torch.int32)
for rank in range(placement.num_ranks):
    expert_map = torch.tensor(placement.expert_map(rank), dtype=torch.int32)
    load = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    num_local = placement.num_local
    weights, slots = kernels.route(logits, bias, routing, expert_map, load, num_local, counts)
    own = own_slots(ids, expert_map).masked_fill(~is_token[:, None], num_local)
    assert torch.equal(slots.long(), own)
    assert torch.equal(weights == 0, own == num_local)
    assert torch.equal(load, ids[is_token].flatten().bincount(minlength=NUM_EXPERTS))
"""

SORT_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.experts.moe_routing import sort_by_expert

torch.manual_seed(0)
# Of all experts, or of some; pairs fill whole blocks, or the last one in part.
for num_choices, num_experts, num_tokens, top_k in (
    (8, 5, 101, 3), (8, 8, 256, 4), (20, 20, 900, 4), (128, 100, 2200, 2)
):
    ids = torch.stack([torch.randperm(num_choices)[:top_k] for _ in range(num_tokens)]).int()
    ids = ids.clamp(max=num_experts)
    rows = torch.full((ids.numel(),), -1, dtype=torch.int32)
    pairs, starts = sort_by_expert(ids, num_experts, num_choices, rows)
    counts = ids.flatten().bincount(minlength=num_experts)[:num_experts]
    assert starts[0] == 0 and torch.equal(starts.diff().long(), counts)
    order = ids.flatten().argsort(stable=True)[: counts.sum()]
    assert torch.equal(pairs[: counts.sum()].long(), order)
    assert torch.equal(rows[order].long(), torch.arange(len(order)))
    assert (rows < 0).sum() == ids.numel() - len(order)
"""

SQUARED_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.ops.experts import moe as reference
from models.ops.experts.expert_parallel import own_slots
from models.kernels.experts import moe as kernels
from models.parallel.expert_placement import ExpertPlacement
from tests.support.interpreter_rounding import round_exactly
from tests.support.moe_case import (
    NUM_EXPERTS, ROUTINGS, exactly, make_logits, make_quantized_experts, part_of
)
from tests.support.tolerances import assert_rows_close

torch.manual_seed(0)
round_exactly()
# What no kernel has written must not reach the sum.
torch.utils.deterministic.fill_uninitialized_memory = True
torch.use_deterministic_algorithms(True)
placement = ExpertPlacement.first(NUM_EXPERTS, 3, 2)
routing = ROUTINGS["sigmoid-groups"]
for kind, hidden_size, inner in (("fp8", 136, 40), ("fp8-rows", 40, 200)):
    experts = make_quantized_experts(kind, hidden=hidden_size, inner=inner, is_squared=True)
    for num_tokens in (1, 5):
        logits, bias = make_logits(num_tokens, routing)
        weights, ids = reference.route(logits, bias, routing)
        hidden = torch.randn(num_tokens, hidden_size)
        exact = reference.apply_experts(
            hidden.double(), weights.double(), ids, exactly(experts), rounds_activations=True
        )
        actual = kernels.apply_experts(hidden, weights, ids.int(), experts)
        assert_rows_close(actual, exact)
        total = 0
        for rank in range(placement.num_ranks):
            expert_map = torch.tensor(placement.expert_map(rank), dtype=torch.int32)
            slots = own_slots(ids, expert_map)
            own_weights = weights.masked_fill(slots == placement.num_local, 0.0)
            part = part_of(experts, placement.experts_of(rank))
            total += kernels.apply_experts(hidden, own_weights, slots.int(), part).double()
        assert_rows_close(total.float(), exact)
"""

FP8_ROWS_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.number_formats import BLOCK
from models.ops.products.fp8_linear import quantize
from models.kernels.experts.fp8.fp8_rows import rounded_rows
from models.kernels.experts.moe_routing import sort_by_expert
from tests.support.interpreter_rounding import round_exactly

torch.manual_seed(0)
round_exactly()
NUM_EXPERTS, TOP_K = 5, 3
# Some pairs are of experts that are not here, and an expert has none.
ids = torch.stack([torch.randperm(8)[:TOP_K] for _ in range(11)]).int()
ids = torch.where(ids == 2, 7, ids).clamp(max=NUM_EXPERTS)
hidden = torch.randn(11, 328).bfloat16()
expected, expected_scale = quantize(hidden, BLOCK)
rows = torch.full((ids.numel(),), -1, dtype=torch.int32)
pairs, starts = sort_by_expert(ids, NUM_EXPERTS, 8, rows)
num_here = int(starts[-1])
assert torch.equal(rows.long()[pairs[:num_here].long()], torch.arange(num_here))
x, scale = rounded_rows(hidden, ids, starts, rows, NUM_EXPERTS, is_alone=False)
alone, alone_scale = rounded_rows(hidden, ids, ids, ids, NUM_EXPERTS, is_alone=True)
ends = set()
for pair, expert in enumerate(ids.flatten().tolist()):
    if expert == NUM_EXPERTS:
        continue
    token, row, start = pair // TOP_K, int(rows[pair]), int(starts[expert])
    assert torch.equal(x[row].float(), expected[token].float())
    assert torch.equal(alone[pair].float(), expected[token].float())
    # The copy engine takes scales from multiples of four on.
    at = row - start + -(-start // 4) * 4 + 4 * expert
    assert torch.equal(scale[:, at], expected_scale[token])
    assert torch.equal(alone_scale[:, 4 * pair], expected_scale[token])
    ends.add(at)
assert len(ends) == num_here
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        *(PROGRAM, MXFP4_PROGRAM, FP8_PROGRAM, FP8_ROWS_PROGRAM, SQUARED_PROGRAM),
        *(PARTIAL_PROGRAM, SORT_PROGRAM),
    ],
    ids=["plain", "mxfp4", "fp8", "fp8-rows-of-experts", "squared", "partial", "sort"],
)
def test_kernels_agree_with_the_references_in_the_interpreter(program):
    run_interpreted(program)
