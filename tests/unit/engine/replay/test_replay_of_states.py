"""Replays of models whose layers keep states, with and without drafts, from any step on."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.core.snapshot import PendingSnapshot
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.request import Request, SamplingParams
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.compilation import compilation_config
from tests.support.engine_harness import RecordingSink
from tests.support.graph_engine import GraphEngine
from tests.support.mtp_checkpoints import write_mtp_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import engine_settings, write_recording

LONG = [(7 * i * i + 3 * i + 11) % 90 for i in range(200)]
FIRST = [LONG[:3], LONG[:100], LONG[50:115], LONG[:70] + LONG[120:150]]
SECOND = [LONG[:110], LONG[:90], LONG[:70] + LONG[120:160]]
SIZES = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 64, "num_blocks": 300}
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
)
LOOKUP = {"num_speculative_tokens": 2, "min_speculative_tokens": 2, "lookup_sizes": (1, 2)}
LAYER = {"num_speculative_tokens": 2, "min_speculative_tokens": 2}


def record(folder, target, *, first_step, variant, **options):
    """Runs requests and then others that start from their snapshots; records from a step on."""
    if variant == "mtp":
        write_mtp_checkpoint(folder, "qwen3_5", agreement=0.98, max_position_embeddings=256)
    else:
        write_checkpoint(folder, variant, max_position_embeddings=256)
    engine = GraphEngine(folder, GRAPHS, **(SIZES | options))
    engine.capture()
    opening, steps = Snapshot(next_step_id=1), []
    for prompts in (FIRST, SECOND):
        for index, prompt in enumerate(prompts):
            engine.scheduler.add(
                Request(
                    request_id=f"{len(steps)}-{index}", handle=index, prompt_token_ids=prompt,
                    sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=20 + 7 * index),
                    sink=RecordingSink(), arrival_s=0.0,
                )
            )  # fmt: skip
        while engine.scheduler.has_work:
            if engine.scheduler.next_step_id == first_step:
                opening = PendingSnapshot(
                    engine.scheduler.running, next_step_id=first_step, num_in_flight=0
                ).message()
            step = engine.scheduler.schedule()
            result = engine.runner.execute(step.descriptor).message()
            engine.scheduler.update(step, result)
            if step.step_id >= first_step:
                steps.append((step.descriptor, result))
    assert engine.scheduler.counts.num_snapshots_used >= 2
    settings = engine_settings(folder, engine.limits, num_blocks=SIZES["num_blocks"])
    if "lookup_sizes" in options:
        settings.speculative_method = "ngram"
    opening.engine.CopyFrom(settings)
    return write_recording(target / "trace.binpb", steps, snapshot=opening)


def run(trace, folder, against, load=LoadedModel.load, **flags):
    report = []
    config = ReplayConfig.from_flags(
        trace=trace, model=folder, against=against, device="cpu", use_inductor=False,
        compilation_level=0, compile_cache_dir=trace.parent / "compiled", **flags,
    )  # fmt: skip
    totals = replay(config, report.append, load=load)
    return totals, "\n".join(report)


@pytest.mark.parametrize("first_step", [1, 12, 45])
@pytest.mark.parametrize(
    ("variant", "options"),
    [("falcon_h1", {}), ("lfm2", {}), ("mamba2", {}), ("qwen3_5_odd", LOOKUP), ("mtp", LAYER)],
    ids=["falcon_h1", "lfm2", "mamba2", "lookup", "mtp"],
)
def test_an_honest_recording_shows_no_difference(tmp_path, variant, options, first_step):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    trace = record(folder, tmp_path, first_step=first_step, variant=variant, **options)
    for against in ("eager", "full"):
        totals, report = run(trace, folder, against)
        assert totals.is_clean, report
        assert totals.num_steps > 10
        if against == "eager":
            assert totals.num_exact == totals.num_steps


def test_a_state_that_a_graph_spoils_is_found_where_it_is(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    trace = record(folder, tmp_path, first_step=1, variant="qwen3_5_odd", **LOOKUP)

    def load(config):
        loaded = LoadedModel.load(config)

        def spoil(module, args, output):
            context = get_forward_context()
            if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
                memory = context.kv_cache_data[3].memory.view(torch.float32)
                memory[:, 1:].mul_(1.5)  # the null block is the capture's

        loaded.model.model.layers[3].self_attn.register_forward_hook(spoil)
        return loaded

    totals, report = run(trace, folder, "full", load=load)
    assert 0 < totals.num_different <= totals.num_by_graph
    assert "layer 3 state" in report
