"""Captured CUDA graphs: same tokens as eager, bad ones caught, no wait on the steady path."""

import asyncio
import time

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kernels import gpu
from protos.engine.v1.worker_pb2 import GraphReport, GraphState
from services.engine import batch
from services.engine.batch import FallbackReason, StepResult, read_int32
from services.engine.compilation.graphs.capture_plan import full_decode_key
from services.engine.compilation.graphs.cuda_recorder import CUDAGraphRecorder
from services.engine.compilation.graphs.graph_runner import GraphRunner
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.sampling.sampler import greedy
from services.engine.worker.executor import WorkerExecutor
from tests.support.compilation import compilation_config
from tests.support.graph_captures import completed
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import StepDriver

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 24
SIZES = (1, 2, 4, 8)
RAN_GRAPH = FallbackReason.FALLBACK_REASON_UNSPECIFIED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    # Our attention kernels want heads of a power of two, as real models have.
    write_checkpoint(folder, "qwen3", head_dim=32)
    return folder


def decode_graphs(*sizes):
    return compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=sizes
    )


def eager(folder, **changes):
    return GraphEngine(folder, compilation_config(), device="cuda", **changes)


def captured(folder, *sizes, **changes):
    engine = GraphEngine(folder, decode_graphs(*sizes), device="cuda", **changes)
    assert engine.prepared.mode is CUDAGraphMode.FULL_DECODE_ONLY
    assert [outcome.fault for outcome in engine.capture()] == [""] * len(sizes)
    return engine


def decode_reasons(engine):
    return {
        reason
        for (descriptor, _), reason in zip(engine.steps, engine.reasons, strict=True)
        if descriptor.attn_metadata.max_seqlen_q == 1
    }


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}])
def test_graphs_give_the_tokens_of_eager_steps(folder, sampling):
    engine = captured(folder, *SIZES)
    expected = eager(folder).run(PROMPTS, NUM_OUTPUT, **sampling)
    assert engine.run(PROMPTS, NUM_OUTPUT, **sampling) == expected
    assert decode_reasons(engine) == {RAN_GRAPH}


def test_graphs_survive_each_other_in_one_pool(folder):
    engine = captured(folder, *SIZES)
    expected = eager(folder).run(PROMPTS, NUM_OUTPUT)
    for _ in range(3):
        for num_prompts in (5, 1, 3, 2):
            outputs = engine.run(PROMPTS[:num_prompts], NUM_OUTPUT)
            assert outputs == expected[:num_prompts]


def test_preemption_and_padding_give_the_same_tokens(folder):
    prompts = [[n, 3, n, 5, 6, 7] for n in range(6)]
    small = {"num_blocks": 12, "max_num_seqs": 6}
    engine = captured(folder, 4, 6, **small)
    assert engine.run(prompts, 20) == eager(folder, **small).run(prompts, 20)
    assert engine.scheduler.counts.num_preemptions > 0


def test_dummy_requests_write_to_the_null_block_alone(folder):
    engine = captured(folder, 8)
    for layer in engine.cache:
        assert layer.k[0].any()
        assert not layer.k[1:].any()


@pytest.mark.parametrize("variant", ["gemma4", "mimo_v2"])
def test_layers_of_several_sizes_repeat_what_they_compute_of_dummies(tmp_path, variant):
    write_checkpoint(tmp_path, variant)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=(3, 8, 20, 64)
    )
    for _ in range(3):
        engine = GraphEngine(tmp_path, config, device="cuda", block_size=16)
        assert [outcome.fault for outcome in engine.capture() if outcome.fault] == []


class TestAPlantedBadGraph:
    def test_a_graph_with_a_wrong_address_is_quarantined_and_serving_goes_on(self, folder):
        engine = captured(folder, 4, 8)
        buffers = engine.runner.buffers
        buffers.block_table = buffers.block_table.clone()
        engine.runner.forward._block_tables = [buffers.block_table]
        assert engine.run(PROMPTS[:3], NUM_OUTPUT) == eager(folder).run(PROMPTS[:3], NUM_OUTPUT)
        assert "input block_table" in engine.ledger.figures[0].fault
        assert FallbackReason.FALLBACK_REASON_QUARANTINED in engine.reasons
        assert RAN_GRAPH not in engine.reasons

    def test_a_graph_that_keeps_a_number_of_its_capture_never_serves(self, folder):
        engine = GraphEngine(folder, decode_graphs(4), device="cuda")
        model = engine.model

        class Counter:
            """Computes with a number of the host, which a graph knows as it was at its capture."""

            num_calls = 0

            def __call__(self, *inputs):
                self.num_calls += 1
                return model(*inputs) * self.num_calls

        engine.runner.forward.run_model = Counter()
        (outcome,) = engine.capture()
        assert "off by" in outcome.fault
        engine.runner.forward.run_model = model
        assert engine.run(PROMPTS[:3], 6) == eager(folder).run(PROMPTS[:3], 6)

    @pytest.mark.parametrize("plant", ["stale", "unwritten"])
    def test_tokens_that_are_not_those_of_the_logits_are_a_fault(self, plant):
        device = torch.device("cuda", 0)
        contents = torch.randn(2, 4, 1000, device=device)
        logits = contents[0].clone()
        chosen = torch.zeros(4, dtype=torch.int32, device=device)
        runner = GraphRunner(CUDAGraphRecorder(device, torch.float32))
        key = full_decode_key(4)
        num_runs = 0

        def program():
            nonlocal num_runs
            num_runs += 1
            computed = logits * 2
            if plant == "stale":
                # A number of the host, which a graph knows as it was at its capture.
                tokens = computed.argmax(dim=-1).int() + num_runs
            else:
                # The capture leaves out the kernel that writes the tokens.
                if num_runs == 1:
                    chosen.copy_(computed.argmax(dim=-1))
                tokens = chosen
            return computed, tokens

        def captured(implied):
            nonlocal num_runs
            num_runs = 0
            capture = runner.capture(
                key,
                program,
                {"logits": logits},
                lambda variant: logits.copy_(contents[variant]),
                implied=implied,
            )
            return completed(capture)

        for implied in (None, lambda outputs: [greedy(outputs[0]).int()]):
            assert "of the integers that it computes are wrong" in captured(implied).fault
            assert key not in runner

    def test_a_program_that_waits_for_the_device_is_refused_and_the_device_goes_on(self, folder):
        x = torch.ones(4, device="cuda")
        recorder = CUDAGraphRecorder(torch.device("cuda", 0), torch.float32)
        with pytest.raises(GraphFaultError, match="captur"):
            recorder.warm_up(lambda: x * x.sum().item())
        recording = recorder.record(lambda: x * 2)
        x.fill_(3.0)
        recording.replay()
        assert recording.output.tolist() == [6.0] * 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replayed_step_never_waits_for_the_device(folder):
    engine = captured(folder, *SIZES)
    engine.run(PROMPTS[:3], 4)  # prefill reads back where kernels are missing
    execute = engine.runner.execute

    def strict(descriptor):
        is_decode = descriptor.attn_metadata.max_seqlen_q == 1
        try:
            torch.cuda.set_sync_debug_mode("error" if is_decode else "default")
            return execute(descriptor)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.execute = strict
    outputs = engine.run(PROMPTS[:3], NUM_OUTPUT)
    assert outputs == eager(folder).run(PROMPTS[:3], NUM_OUTPUT)


def test_capture_reports_seconds_and_bytes(folder):
    engine = GraphEngine(folder, decode_graphs(*SIZES), device="cuda")
    started_s = time.monotonic()
    outcomes = engine.capture()
    elapsed_s = time.monotonic() - started_s
    assert 0 < sum(outcome.capture_s for outcome in outcomes) <= elapsed_s
    assert all(outcome.num_bytes >= 0 for outcome in outcomes)


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL]
)
def test_steps_of_all_kinds_give_the_tokens_of_eager_steps(folder, mode, level):
    config = compilation_config(
        level=CompilationLevel(level),
        use_inductor=False,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=(4, 8, 64),
    )
    engine = GraphEngine(folder, config, device="cuda")
    assert engine.prepared.mode is mode
    assert {outcome.fault for outcome in engine.capture()} == {""}
    # Compiled, but without graphs: level 0 adds up in another order.
    plain = config.model_copy(update={"cudagraph_mode": "none"})
    expected = GraphEngine(folder, plain, device="cuda").run(PROMPTS, NUM_OUTPUT)
    for _ in range(2):
        assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert set(engine.reasons) == {RAN_GRAPH}


@pytest.mark.parametrize("mode", CUDAGraphMode, ids=str)
def test_without_our_kernels_every_mode_serves_in_pieces_or_eagerly(folder, mode, monkeypatch):
    # As on a machine with CUDA and without Triton: the reference of attention plans on the host.
    monkeypatch.setattr(gpu, "HAS_TRITON", False)
    config = compilation_config(cudagraph_mode=mode, cudagraph_capture_sizes=(4, 8, 64))
    engine = GraphEngine(folder, config, device="cuda")
    assert engine.prepared.mode is (CUDAGraphMode.PIECEWISE if mode else CUDAGraphMode.NONE)
    assert {outcome.fault for outcome in engine.capture()} <= {""}
    expected = eager(folder).run(PROMPTS, NUM_OUTPUT)
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert (RAN_GRAPH in engine.reasons) == bool(mode)


def test_whole_graphs_serve_prompts_in_chunks_beside_decodes(folder):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=(4, 12, 16)
    )
    prompts = [[n + 3] * (7 * n + 1) for n in range(8)]
    limits = {"max_num_batched_tokens": 16, "device": "cuda"}
    engine = GraphEngine(folder, config, **limits)
    assert {outcome.fault for outcome in engine.capture()} == {""}
    expected = GraphEngine(folder, compilation_config(), **limits).run(prompts, NUM_OUTPUT)
    for _ in range(2):
        assert engine.run(prompts, NUM_OUTPUT) == expected
    whole = {step.cudagraph_runtime_mode for step, _ in engine.steps}
    assert whole == {batch.CUDAGraphMode.CUDA_GRAPH_MODE_FULL}


@pytest.mark.parametrize("level", [2, 3])
def test_graphs_of_what_inductor_made_give_its_tokens(folder, level):
    config = compilation_config(
        level=CompilationLevel(level),
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=(4, 8, 64),
    )
    engine = GraphEngine(folder, config, device="cuda")
    assert {outcome.fault for outcome in engine.capture()} == {""}
    plain = config.model_copy(update={"cudagraph_mode": "none"})
    expected = GraphEngine(folder, plain, device="cuda").run(PROMPTS, NUM_OUTPUT)
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected == eager(folder).run(PROMPTS, NUM_OUTPUT)
    assert set(engine.reasons) == {RAN_GRAPH}


def test_a_bad_graph_of_pieces_is_quarantined_and_serving_goes_on(folder):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.PIECEWISE, cudagraph_capture_sizes=(64,)
    )
    engine = GraphEngine(folder, config, device="cuda")
    engine.capture()
    buffers = engine.runner.buffers
    buffers._positions = buffers._positions.clone()
    assert engine.run(PROMPTS, NUM_OUTPUT) == eager(folder).run(PROMPTS, NUM_OUTPUT)
    (figures,) = engine.ledger.figures
    assert "when captured" in figures.fault
    assert set(engine.reasons) == {FallbackReason.FALLBACK_REASON_QUARANTINED}


def test_a_worker_serves_before_its_graphs_are_there(folder):
    asyncio.run(serve_at_once(folder))


async def serve_at_once(folder):
    config = EngineConfig.from_flags(
        model=folder,
        device="cuda",
        dtype="float32",
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_kv_blocks=64,
        cudagraph_mode="full_decode_only",
        cudagraph_capture_sizes=list(SIZES),
        capture_while_serving=True,
    )
    driver = StepDriver(folder)
    sequence = driver.add(PROMPTS[1])
    executor = WorkerExecutor(config)
    try:
        ready = await executor.start()
        assert (len(ready.planned_graphs), len(ready.graphs)) == (len(SIZES), 0)
        for num_tokens in (10, 1, 1, 1):
            executor.send(driver.descriptor([(sequence, num_tokens)]))
        tokens, reports = [], []
        while len(tokens) < 4 or len(reports) < len(SIZES):
            event = await executor.receive()
            if isinstance(event, GraphReport):
                if event.state != GraphState.GRAPH_STATE_PROVISIONAL:
                    reports.append(event)
            elif isinstance(event, StepResult):
                tokens.append(int(read_int32(event.token_ids)[0]))
    finally:
        await executor.stop()
    assert {report.key.graph_bs for report in reports} == set(SIZES)
    assert {report.fault for report in reports} == {""}
    alone = StepDriver(folder)
    expected = alone.add(PROMPTS[1])
    alone.decode([expected], 4)
    assert tokens == expected.output
