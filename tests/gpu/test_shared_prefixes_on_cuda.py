"""Shared prefixes that attention reads once, against the float64 reference and without sharing."""

from dataclasses import replace

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from tests.support.attention_case import Heads, make_case
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.prefix_case import with_shared
from tests.support.random_checkpoints import write_checkpoint
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

HEADS = {
    "qwen3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "one-of-16": Heads(num_heads=16, num_kv_heads=1, head_dim=128),
    "group-of-3": Heads(num_heads=6, num_kv_heads=2, head_dim=96),
    "gpt-oss": Heads(num_heads=16, num_kv_heads=2, head_dim=64),
    "broad": Heads(num_heads=8, num_kv_heads=2, head_dim=256),
    "broadest": Heads(num_heads=4, num_kv_heads=1, head_dim=512),
}
BATCHES = {
    "few": ([1] * 6, [3100, 3010, 3009, 77, 5000, 3333], [([0, 1, 2, 4, 5], 188)]),
    "many": (
        [1] * 70,
        [1025 + 7 * i for i in range(70)],
        [(list(range(3, 60)), 64), ([61, 60, 65], 90)],
    ),
    "nested": (
        [1] * 60,
        [2600 + 9 * i for i in range(60)],
        [
            (list(range(1, 56)), 40),
            (list(range(2, 24)), 90),
            (list(range(30, 50)), 101),
            (list(range(3, 9)), 160),
        ],
    ),
    "drafts": (
        [4] * 40 + [3, 1],
        [1025 + 61 * i for i in range(42)],
        [(list(range(3, 42)), 60), ([20, 21, 25, 41], 90)],
    ),
    "drafts-beside-chunks": (
        [2, 40, 2, 2, 300, 1, 0],
        [2000, 90, 1601, 5700, 300, 1900, 0],
        [([0, 3, 2, 5], 90)],
    ),
    "beside-chunks": (
        [1, 40, 1, 1, 300, 1, 0],
        [2000, 90, 1601, 1700, 300, 9, 0],
        [([0, 3, 2], 100)],
    ),
}


def run(case) -> torch.Tensor:
    output = case.run()
    assert case.metadata.workspace.counters.count_nonzero() == 0
    return output


@pytest.mark.parametrize("has_fp8_cache", [False, True], ids=["16-bit", "fp8-cache"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_requests_that_share_keys_get_what_each_gets_by_itself(batch, heads, has_fp8_cache):
    q_lens, seq_lens, prefixes = batch
    options = {"has_sinks": heads.head_dim == 64, "soft_cap": 30.0 if heads.head_dim == 256 else 0}
    case = make_case(
        q_lens, seq_lens, heads, dtype=torch.bfloat16, device="cuda", has_fp8_cache=has_fp8_cache,
        has_norm=heads.head_dim == 128, **options,
    )  # fmt: skip
    case = with_shared(case, prefixes)
    output = run(case)
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    assert_rows_close(output[live], case.exact_reading().run()[live.cpu()])
    alone = replace(case, metadata=replace(case.metadata, prefix_plan=None))
    assert_rows_close(output[live], run(alone)[live])


def test_a_graph_replays_with_other_plans():
    heads = HEADS["qwen3-8b"]
    case = make_case(
        [1] * 20, [900 + 5 * i for i in range(20)], heads, dtype=torch.bfloat16, device="cuda"
    )
    whole = with_shared(case, [(list(range(20)), 50)])
    plans = [
        with_shared(whole, prefixes).metadata.prefix_plan
        for prefixes in (
            [(list(range(20)), 50)],
            [],
            [([4, 7, 9], 20), ([1, 0, 2, 3, 5], 50)],
            [(list(range(18)), 10), (list(range(4, 12)), 50), ([5, 8], 51)],
        )
    ]
    fixed = replace(plans[0], **{name: getattr(plans[0], name).clone() for name in FIELDS})
    case = replace(whole, metadata=replace(whole.metadata, prefix_plan=fixed))
    output = torch.empty_like(case.q)
    case.run_into(output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    expected = case.exact_reading().run()
    for plan in plans:
        for name in FIELDS:
            getattr(fixed, name).copy_(getattr(plan, name))
        output.fill_(torch.nan)
        graph.replay()
        assert_rows_close(output, expected)


FIELDS = ("tiles", "queries", "tile_slots", "own_lens")
SYSTEM = list(range(2, 90))
PROMPTS = [*([*SYSTEM, 1 + i] for i in range(9)), [70] * 9]


@pytest.mark.parametrize("cache_dtype", [None, FP8_CACHE_DTYPE], ids=["fp32", "fp8"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_of_whole_graphs_are_those_without_sharing(
    tmp_path, num_drafts, family, cache_dtype
):
    write_checkpoint(tmp_path, family, max_position_embeddings=256)
    config = compilation_config(cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=(4, 16))

    def start(shared_prefix_tokens):
        engine = GraphEngine(
            tmp_path, config, device="cuda", num_blocks=400, max_num_seqs=16, max_model_len=160,
            cache_dtype=cache_dtype, shared_prefix_tokens=shared_prefix_tokens,
            num_speculative_tokens=num_drafts, lookup_sizes=(1, 3) if num_drafts else None,
        )  # fmt: skip
        engine.capture()
        return engine

    def run(engine):
        return engine.run([SYSTEM], 1) + engine.run(PROMPTS, 30)

    def num_sharing_replays(engine):
        return sum(each.num_replays for each in engine.ledger.figures if each.key.shares_prefixes)

    expected = run(start(0))
    engine = start(16)
    # Steps that share nothing run the graphs of an engine without the feature.
    others = [[20 + 5 * i] * 20 for i in range(10)]
    assert engine.run(others, 12) == start(0).run(others, 12)
    assert engine.prepared.graphs.num_pending == 0
    # Steps that share run them, too, until graphs of their own are captured.
    assert run(engine) == expected
    assert num_sharing_replays(engine) == 0
    missed = engine.capture()
    assert missed
    assert all(outcome.key.shares_prefixes and not outcome.fault for outcome in missed)
    for _ in range(2):
        before = num_sharing_replays(engine)
        assert run(engine) == expected
        assert num_sharing_replays(engine) > before + (5 if num_drafts else 20)
        assert engine.run(others, 12) == start(0).run(others, 12)
    assert engine.faults == []


def test_graphs_and_eager_steps_share_alike(tmp_path):
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=256)
    branch = [*SYSTEM, *range(40, 80)]
    prompts = [*PROMPTS, *([*branch, 1 + i] for i in range(6))]
    tokens = []
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(4, 16))
        engine = GraphEngine(
            tmp_path, config, device="cuda", num_blocks=400, max_num_seqs=16, max_model_len=200,
            shared_prefix_tokens=16,
        )  # fmt: skip
        engine.capture_sharing()
        tokens.append(engine.run([SYSTEM, branch], 1) + engine.run(prompts, 20))
        assert engine.faults == []
        shared = [order.attn_metadata.shared_prefixes.counts for order, _ in engine.steps]
        assert max(map(len, shared)) >= 8  # one prefix inside the other
    assert tokens[0] == tokens[1] == tokens[2]
