"""Attention with a plan of shared prefixes computes what attention without one does."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import GraphKey, forward_context
from tests.support.attention_case import Heads, make_case
from tests.support.prefix_case import with_shared
from tests.support.tolerances import assert_rows_close

HEADS = [(1, 1, 8), (4, 2, 8), (6, 1, 12), (8, 8, 4)]


@st.composite
def shared_cases(draw):
    """Draws a step whose requests are in some trees of prefixes; chunks share nothing."""
    block_size = draw(st.sampled_from((2, 4, 5)))
    most_queries = draw(st.sampled_from((1, 1, 2, 5)))
    groups, requests, lengths = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        first, count, num_blocks = len(requests), draw(st.integers(2, 20)), draw(st.integers(1, 6))
        groups.append((first, count, num_blocks))
        queries = draw(st.lists(st.integers(1, most_queries), min_size=count, max_size=count))
        requests += queries
        own = [each + draw(st.integers(0, 8)) for each in queries]
        shared = [num_blocks] * count
        for _ in range(draw(st.integers(0, 2))):  # some of these share more
            if count > 3:
                first, count = first + draw(st.integers(0, 1)), count - draw(st.integers(1, 2))
                num_blocks += draw(st.integers(1, 3))
                groups.append((first, count, num_blocks))
                for each in range(first, first + count):
                    shared[each - len(lengths)] = num_blocks
        lengths += [n * block_size + each for n, each in zip(shared, own, strict=True)]
    for _ in range(draw(st.integers(0, 3))):
        q_len = draw(st.sampled_from((0, 1, 1, 3, 9)))
        requests.append(q_len)
        lengths.append(q_len + draw(st.integers(0, 20)) if q_len else 0)
    order = draw(st.permutations(range(len(requests))))
    place = {each: number for number, each in enumerate(order)}
    prefixes = [
        ([place[first + i] for i in range(count)], num_blocks)
        for first, count, num_blocks in groups
    ]
    heads = draw(st.sampled_from(HEADS))
    case = make_case(
        [requests[each] for each in order],
        [lengths[each] for each in order],
        Heads(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2]),
        block_size=block_size,
        has_sinks=draw(st.booleans()),
        has_fp8_cache=draw(st.booleans()),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 1.5))),
        sliding_window=draw(st.sampled_from((None, None, None, 7, -8))),
        has_rotation=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    return with_shared(case, prefixes)


def without_plan(case):
    return replace(case, metadata=replace(case.metadata, prefix_plan=None))


@settings(max_examples=150, deadline=None)
@given(shared_cases())
def test_a_plan_changes_no_output(case):
    live = (case.metadata.seq_lens > 0).repeat_interleave(case.metadata.query_start_loc.diff())
    assert_rows_close(case.run()[live], without_plan(case).run()[live])


def test_a_prefix_is_read_from_its_first_request():
    case = make_case(
        [1] * 20, [13] * 20, Heads(num_heads=2, num_kv_heads=1, head_dim=8), block_size=4
    )
    shared = with_shared(case, [(list(range(20)), 3)])
    expected = shared.run()
    plan = shared.metadata.prefix_plan
    tiles = plan.tiles[:, :3].tolist()
    assert tiles == [[0, 16, 0], [16, 4, 0], [0, 0, 0], [12, 12, 0], [0, 0, 0]]
    shared.metadata.block_tables[1:, :3] = 0
    assert torch.equal(shared.run(), expected)


def test_a_recorded_pass_repeats_with_another_plan():
    case = make_case(
        [1] * 6, [13, 14, 15, 9, 5, 7], Heads(num_heads=4, num_kv_heads=2, head_dim=8), block_size=4
    )
    shared = with_shared(case, [([0, 2, 1], 3), ([5, 4], 1)])
    expected = without_plan(shared).run()
    key = GraphKey(kind=GraphKind.DECODE, num_tokens=6, graph_bs=6, max_q_len=1)
    full = {"batch_descriptor": key, "cudagraph_runtime_mode": CUDAGraphMode.FULL}
    for plan in (shared.metadata.prefix_plan, with_shared(case, []).metadata.prefix_plan):
        each = replace(shared, metadata=replace(shared.metadata, prefix_plan=plan))
        output = torch.full(each.q.shape, torch.nan)
        with forward_context(replace(each.context(), **full)):
            torch.ops.octavo.unified_attention_with_output(*each.arguments(output))
        assert_rows_close(output, expected)
