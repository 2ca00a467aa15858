"""Engines that read shared prefixes once make the tokens of engines that do not."""

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.kv_cache import FP8_CACHE_DTYPE
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import BatchDescriptor, SharedPrefixes, pack_int32, read_int32
from services.engine.compilation.graphs.capture_plan import full_decode_key, piecewise_key
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.config.compilation_level import CompilationLevel
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.request import RequestStatus
from services.engine.worker.inputs import prefix_plan
from services.engine.worker.inputs.prefix_plan import PlannedPrefixes, PrefixBuffers
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import engine_settings, write_recording
from tests.support.requests import make_request

EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
DECODES = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(1, 2, 4, 8)
)
WHOLE = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    cudagraph_capture_sizes=(2, 8),
    cudagraph_piece_sizes=(8, 16, 64),
)
PIECES = compilation_config(
    level=CompilationLevel.PIECEWISE,
    use_inductor=False,
    cudagraph_mode=CUDAGraphMode.PIECEWISE,
    cudagraph_capture_sizes=(8, 16, 64),
)
SYSTEM = [5, 17, 3, 44, 2, 9, 31, 60, 7, 8, 1, 90]
BRANCH = [*SYSTEM, 11, 12, 13, 14, 15, 16, 21, 22]
PLANNED = PlannedPrefixes.read(
    SharedPrefixes(
        requests=pack_int32(range(4)), counts=pack_int32([4]), num_blocks=pack_int32([2])
    ),
    query_start_loc=np.arange(9),
    seq_lens=np.full(8, 20),
    block_size=4,
)
PROMPTS = [
    *([*SYSTEM, 30 + i] for i in range(4)),
    *([*BRANCH, 40 + i] for i in range(5)),
    [70] * 9,
    [*SYSTEM, 30],
]


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss", "gemma2", "llama4"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param)
    return folder


def run_engine(folder, config, shared_prefix_tokens, **options):
    engine = GraphEngine(
        folder, config, shared_prefix_tokens=shared_prefix_tokens, num_blocks=300, **options
    )
    engine.capture_sharing()
    tokens = engine.run([SYSTEM, BRANCH], 2) + engine.run(PROMPTS, 20)
    assert engine.faults == []
    return engine, tokens


def prefixes_of(steps):
    """Returns the requests of each prefix, of all steps that share some."""
    each = (order.attn_metadata.shared_prefixes for order, _ in steps)
    return [read_int32(prefixes.counts).tolist() for prefixes in each if prefixes.counts]


@pytest.mark.parametrize("cache_dtype", [None, FP8_CACHE_DTYPE], ids=["fp32", "fp8"])
@pytest.mark.parametrize(
    "config", [EAGER, DECODES, WHOLE, PIECES], ids=["eager", "decodes", "whole", "pieces"]
)
def test_tokens_are_those_without_sharing(folder, config, cache_dtype, tmp_path):
    config = config.model_copy(update={"compile_cache_dir": tmp_path})
    _, expected = run_engine(folder, EAGER, 0, cache_dtype=cache_dtype)
    engine, tokens = run_engine(folder, config, 4, cache_dtype=cache_dtype)
    assert tokens == expected
    assert len(prefixes_of(engine.steps)) > 10
    modes = {
        order.cudagraph_runtime_mode
        for order, _ in engine.steps
        if order.attn_metadata.shared_prefixes.counts
    }
    assert len(modes) == 1 or config is not EAGER


@pytest.mark.parametrize("cache_dtype", [None, FP8_CACHE_DTYPE], ids=["fp32", "fp8"])
@pytest.mark.parametrize("config", [EAGER, DECODES, WHOLE], ids=["eager", "decodes", "whole"])
@pytest.mark.parametrize("is_small_model", [False, True], ids=["looked-up", "small-model"])
def test_requests_with_drafts_share_and_make_the_same_tokens(
    tmp_path, is_small_model, config, cache_dtype
):
    write_checkpoint(tmp_path, "qwen3")
    drafts = {"draft_model": tmp_path} if is_small_model else {"lookup_sizes": (1, 3)}
    drafts |= {"num_speculative_tokens": 3, "cache_dtype": cache_dtype}
    _, expected = run_engine(tmp_path, EAGER, 0, **drafts)
    engine, tokens = run_engine(tmp_path, config, 4, **drafts)
    assert tokens == expected
    with_drafts = [
        order
        for order, _ in engine.steps
        if order.attn_metadata.shared_prefixes.counts and order.context.max_q_len > 1
    ]
    assert len(with_drafts) > 3
    accepted = [read_int32(result.num_accepted_tokens).sum() for _, result in engine.steps]
    assert sum(accepted) > 5


def test_requests_that_come_go_and_are_preempted_make_the_same_tokens(tmp_path):
    write_checkpoint(tmp_path, "qwen3")

    def run(shared_prefix_tokens):
        engine = GraphEngine(
            tmp_path, DECODES, shared_prefix_tokens=shared_prefix_tokens, num_blocks=28
        )
        engine.capture_sharing()
        engine.run([SYSTEM, BRANCH], 1)
        rng = random.Random(7)
        waiting = []
        for i in range(60):
            start = rng.choice((SYSTEM, BRANCH, BRANCH[:16], []))
            prompt = [*start, *(rng.randrange(97) for _ in range(rng.randint(1, 6)))]
            waiting.append(make_request(prompt, max_tokens=rng.randint(9, 30), seed=i))
        requests, in_flight, steps = list(waiting), deque(), []
        scheduler = engine.scheduler
        aborted = []
        while waiting or scheduler.has_work or in_flight:
            if waiting:
                scheduler.add(waiting.pop())
            if len(steps) % 9 == 8 and scheduler.running:
                # Which tokens it has by then does not depend on sharing.
                aborted.append(scheduler.running[0])
                scheduler.abort(aborted[-1])
            if (step := scheduler.schedule()) is not None:
                in_flight.append((step, engine.runner.execute(step.descriptor)))
            if len(in_flight) > 1 or step is None:
                sent, pending = in_flight.popleft()
                result = pending.message()
                scheduler.update(sent, result)
                steps.append((sent.descriptor, result))
        assert scheduler.counts.num_preemptions > 0
        assert aborted
        return [request.token_ids for request in requests], steps

    expected, _ = run(0)
    tokens, steps = run(4)
    assert tokens == expected
    assert len(prefixes_of(steps)) > 20


def test_recordings_have_the_prefixes_and_repeat_bit_by_bit(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    write_checkpoint(folder, "qwen3")
    engine, _ = run_engine(folder, DECODES, 4)
    assert prefixes_of(engine.steps)
    snapshot = Snapshot(engine=engine_settings(folder, engine.limits, num_blocks=300))
    trace = write_recording(tmp_path / "trace.binpb", engine.steps, snapshot=snapshot)
    for against in ("eager", "full"):
        report = []
        config = ReplayConfig.from_flags(
            trace=trace, model=folder, against=against, device="cpu", use_inductor=False
        )
        totals = replay(config, report.append)
        assert totals.is_clean, report


def replays_of(engine):
    """Returns the steps that graphs of decodes ran, by whether these share prefixes."""
    counts = Counter()
    for each in engine.ledger.figures:
        counts[each.key.shares_prefixes] += each.num_replays
    return counts[False], counts[True]


def test_steps_share_by_graphs_of_their_own_once_these_are_captured(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    _, expected = run_engine(tmp_path, EAGER, 0)
    engine = GraphEngine(tmp_path, DECODES, shared_prefix_tokens=4, num_blocks=300)
    planned = {outcome.key for outcome in engine.capture()}
    assert not any(key.shares_prefixes for key in planned)
    engine.run([[70 + i] * 9 for i in range(6)], 9)
    num_plain, num_sharing = replays_of(engine)
    assert (num_plain > 5, num_sharing) == (True, 0)
    assert engine.prepared.graphs.num_pending == 0  # nothing was shared

    tokens = engine.run([SYSTEM, BRANCH], 2) + engine.run(PROMPTS, 20)
    assert tokens == expected
    assert replays_of(engine)[1] == 0
    missed = {outcome.key for outcome in engine.capture()}
    assert missed
    assert {replace(key, shares_prefixes=False) for key in missed} <= planned
    assert {key.graph_bs for key in missed} <= {4, 8}

    num_steps = len(engine.steps)
    tokens = engine.run([SYSTEM, BRANCH], 2) + engine.run(PROMPTS, 20)
    assert tokens == expected
    ordered = [order for order, _ in engine.steps[num_steps:] if order.HasField("graph_key")]
    shares = [bool(order.attn_metadata.shared_prefixes.counts) for order in ordered]
    assert shares == [order.graph_key.shares_prefixes for order in ordered]
    assert 5 < sum(shares) < len(shares)  # the last requests run alone, by plain graphs
    assert replays_of(engine)[1] == sum(shares)
    assert engine.faults == []


def test_graphs_of_other_steps_do_not_read_what_is_shared(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    engine = GraphEngine(tmp_path, WHOLE, shared_prefix_tokens=4)
    buffers = engine.runner.buffers
    key = full_decode_key(8)
    assert "prefixes" not in buffers.fixed(key)
    assert "prefixes" in buffers.fixed(replace(key, shares_prefixes=True))
    lengths = torch.full((8,), 20, dtype=torch.int32)
    plan = buffers.prefixes.plan
    assert plan(lengths, key) is None
    assert plan(lengths, replace(key, shares_prefixes=True)) is not None
    assert plan(lengths[:3], replace(key, shares_prefixes=True)) is None
    for without_graph in (None, piecewise_key(8)):
        assert plan(lengths, without_graph) is None
        buffers.prefixes.write(PLANNED, without_graph)
        assert plan(lengths, without_graph).tile_slots[:, 0].tolist() == [0, 1, 2, 3, *[-1] * 4]
        assert plan(lengths, key) is None
        buffers.prefixes.write(None, key)  # such a graph reads nothing, so nothing is written
        assert plan(lengths, without_graph) is not None
        buffers.prefixes.write(None, without_graph)
        assert plan(lengths, without_graph) is None
    with buffers.prefixes.building_kernels():
        assert plan(lengths) is not None
        assert plan(lengths, key) is None


def test_a_plan_that_could_not_be_written_is_written_by_the_next_step(monkeypatch):
    buffers = PrefixBuffers(8, torch.device("cpu"))
    lengths = torch.full((8,), 20, dtype=torch.int32)

    def fail(target, array):
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(prefix_plan, "overwrite", fail)
        with pytest.raises(MemoryError):
            buffers.write(PLANNED)
    buffers.write(PLANNED)
    assert buffers.plan(lengths).own_lens.tolist() == [12] * 4 + [20] * 4


def test_a_step_whose_graph_is_given_up_does_not_share_what_an_earlier_one_did(tmp_path):
    write_checkpoint(tmp_path, "qwen3")

    def run(shared_prefix_tokens):
        engine = GraphEngine(
            tmp_path, DECODES, shared_prefix_tokens=shared_prefix_tokens, num_blocks=300
        )
        engine.capture()
        engine.run([SYSTEM], 2)
        scheduler, ordered = engine.scheduler, []

        def step(*given_up):
            planned = scheduler.schedule()
            ordered.append(planned.descriptor)
            for key in given_up:  # after it was ordered
                engine.prepared.graphs.give_up(key, GraphFaultError("planted"))
            scheduler.update(planned, engine.runner.execute(planned.descriptor).message())

        sharing = [make_request([*SYSTEM, 30 + i], max_tokens=20) for i in range(5)]
        for request in sharing:
            scheduler.add(request)
        step()
        # Its prompt runs without a graph, in a step with a plan of the requests before it.
        other = make_request(list(range(40, 56)), max_tokens=20)
        scheduler.add(other)
        step()
        scheduler.abort(sharing[0])
        step(full_decode_key(8))
        for _ in range(3):
            step()
        return [request.token_ids for request in (*sharing[1:], other)], ordered

    expected, _ = run(0)
    tokens, ordered = run(4)
    assert ordered[1].attn_metadata.shared_prefixes.counts
    assert ordered[2].graph_key.graph_bs == 8
    assert tokens == expected


def converse(engine, num_sessions, num_turns):
    """Runs sessions after one system prompt, each turn of which goes on after the last one.

    Returns all that was said in each, as soon as no session has a turn left.
    """
    scheduler, in_flight, steps = engine.scheduler, deque(), []
    said = [list(SYSTEM) for _ in range(num_sessions)]
    rngs = [random.Random(number) for number in range(num_sessions)]
    left, live = [num_turns] * num_sessions, {}
    while any(left) or live or in_flight:
        for number, request in list(live.items()):
            if request.status is RequestStatus.FINISHED:
                said[number] = list(request.token_ids)
                del live[number]
        for number, rng in enumerate(rngs):
            if number not in live and left[number]:
                left[number] -= 1
                said[number] += [rng.randrange(97) for _ in range(rng.randint(1, 7))]
                live[number] = make_request(said[number], max_tokens=rng.randint(3, 9))
                scheduler.add(live[number])
        if (step := scheduler.schedule()) is not None:
            in_flight.append((step, engine.runner.execute(step.descriptor)))
        if in_flight and (len(in_flight) > 1 or step is None):
            sent, pending = in_flight.popleft()
            result = pending.message()
            scheduler.update(sent, result)
            engine.ledger.count(sent.descriptor, result)
            steps.append((sent.descriptor, result))
            engine.capture()  # what steps missed
    return said, steps


@pytest.mark.parametrize("max_num_seqs", [8, 5])
def test_agents_with_one_system_prompt_say_the_same_and_read_it_once(tmp_path, max_num_seqs):
    write_checkpoint(tmp_path, "qwen3", max_position_embeddings=256)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL,
        cudagraph_capture_sizes=(4, 8),
        cudagraph_piece_sizes=(16, 32),
    )

    def run(shared_prefix_tokens):
        engine = GraphEngine(
            tmp_path, config, shared_prefix_tokens=shared_prefix_tokens, num_blocks=300,
            max_num_seqs=max_num_seqs, max_model_len=96,
        )  # fmt: skip
        engine.capture()
        said, steps = converse(engine, num_sessions=8, num_turns=4)
        assert engine.faults == []
        return engine, said, steps

    _, expected, _ = run(0)
    engine, said, steps = run(16)
    assert said == expected
    assert len(prefixes_of(steps)) > len(steps) // 3
    kinds = Counter()
    for each in engine.ledger.figures:
        if each.key.shares_prefixes:
            kinds[each.key.kind] += each.num_replays
    assert min(kinds[GraphKind.DECODE], kinds[GraphKind.MIXED]) > 3


@pytest.mark.parametrize(
    ("requests", "counts", "num_blocks", "fault"),
    [
        ([0, 1], [2], [9], "longer than its request"),
        ([0, 0], [2], [1], "twice in a prefix"),
        ([0, 1, 0, 1], [2, 2], [1, 1], "no longer than the one before it"),
        ([0, 1, 1, 2], [2, 2], [1, 2], "different ones before it"),
        ([0, 1, 0, 1, 0, 1, 0, 1], [2, 2, 2, 2], [1, 2, 3, 4], "too many prefixes"),
        ([0, 1, 2] * 4, [3] * 4, [1, 2, 3, 4], "too many requests"),
        ([0, 7], [2], [1], "out of the batch"),
        ([0], [1], [1], "of one request"),
        ([0, 1], [2], [0], "without keys"),
        ([0, 1, 2], [2], [1], "missing or left over"),
        ([0, 1], [2], [], "without a length"),
        ([0], [], [], "without their prefix"),
        ([0, 2], [2], [1], "more queries than 1"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused(tmp_path, requests, counts, num_blocks, fault):
    write_checkpoint(tmp_path, "qwen3")
    engine = GraphEngine(tmp_path, EAGER, shared_prefix_tokens=4)
    for prompt in ([1] * 8, [2] * 8, [3] * 20):
        engine.scheduler.add(make_request(prompt, max_tokens=9))
    step = engine.scheduler.schedule()
    descriptor = BatchDescriptor.FromString(step.descriptor.SerializeToString())
    attention = descriptor.attn_metadata
    attention.query_start_loc = pack_int32([0, 1, 2, 22])
    attention.seq_lens = pack_int32([8, 8, 20])
    descriptor.context.num_tokens = 22
    attention.shared_prefixes.requests = pack_int32(requests)
    attention.shared_prefixes.counts = pack_int32(counts)
    attention.shared_prefixes.num_blocks = pack_int32(num_blocks)
    with pytest.raises(ValueError, match=fault):
        engine.runner.execute(descriptor)
