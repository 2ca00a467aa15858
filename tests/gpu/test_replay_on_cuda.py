"""Replays of CUDA graphs: nothing differs in an honest recording, and a planted fault is named."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.limits import StepLimits
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import engine_settings, write_recording

pytestmark = pytest.mark.gpu

LIMITS = StepLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=16, vocab_size=97
)
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_BLOCKS = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    # Our attention kernels want heads of a power of two, as real models have.
    write_checkpoint(folder, "qwen3", head_dim=32, num_hidden_layers=4)
    return folder


def record(folder, path, dtype, mode=CUDAGraphMode.FULL_DECODE_ONLY):
    config = compilation_config(
        cudagraph_mode=mode, cudagraph_capture_sizes=(1, 2, 4, 8), cudagraph_piece_sizes=(32, 64)
    )
    engine = GraphEngine(
        folder, config, device="cuda", dtype=DTYPES[dtype], num_blocks=NUM_BLOCKS, block_size=16
    )
    engine.capture()
    engine.run(PROMPTS, 16)
    engine.run(PROMPTS, 8, temperature=1.0, top_p=0.9)
    settings = engine_settings(folder, LIMITS, num_blocks=NUM_BLOCKS, dtype=dtype)
    return write_recording(path, engine.steps, snapshot=Snapshot(engine=settings))


def run(trace, folder, against, load=None):
    report = []
    config = ReplayConfig.from_flags(
        trace=trace,
        model=folder,
        against=against,
        device="cuda",
        use_inductor=False,
        compilation_level=3 if against == "piecewise" else 0,
        compile_cache_dir=trace.parent / "compiled",
    )
    totals = replay(config, report.append, **({} if load is None else {"load": load}))
    return totals, "\n".join(report)


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_an_honest_recording_shows_no_difference(folder, tmp_path, against):
    trace = record(folder, tmp_path / "trace.binpb", "float32")
    totals, report = run(trace, folder, against)
    assert totals.num_different == 0, report
    assert totals.num_given_up == 0
    assert (totals.num_by_graph > 0) == (against != "eager")


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_a_recording_of_whole_steps_with_prompts_is_replayed(folder, tmp_path, against):
    trace = record(folder, tmp_path / "trace.binpb", "float32", mode=CUDAGraphMode.FULL)
    totals, report = run(trace, folder, against)
    assert totals.num_different == 0, report
    assert totals.num_given_up == 0
    assert totals.num_by_graph == (0 if against == "eager" else totals.num_steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_differs_inside_a_graph_is_named(folder, tmp_path, dtype):
    def load(config):
        loaded = LoadedModel.load(config)
        model = loaded.model

        def perturb(module, args):
            is_captured = get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
            return (args[0] + 1, *args[1:]) if is_captured else args

        model.model.layers[2].self_attn.attn.register_forward_pre_hook(perturb)
        return loaded

    trace = record(folder, tmp_path / "trace.binpb", dtype)
    totals, report = run(trace, folder, "full", load)
    # In bf16 a token of an eager step may turn on a rounding too.
    assert totals.num_different >= totals.num_by_graph > 0
    assert "first tensor: layer 2 q" in report, report
