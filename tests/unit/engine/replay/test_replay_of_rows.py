"""Replays that run each row of a step alone."""

import pytest

from models.batch_invariance import use_batch_invariance
from models.forward_context import get_forward_context
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.replay.command import replay
from services.engine.replay.config import ReplayConfig
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.invariance import batch_invariance
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import engine_settings, write_recording

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]


@pytest.fixture(autouse=True)
def _off_again():
    yield
    use_batch_invariance(is_on=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen3", num_hidden_layers=4)
    return folder


def record(folder, target, **options):
    """Records an engine in batch-invariant mode."""
    with batch_invariance():
        engine = GraphEngine(folder, compilation_config(), num_blocks=40, **options)
        engine.run(PROMPTS, 10)
        engine.run(PROMPTS[1:], 6, temperature=1.0, top_p=0.9)
    settings = engine_settings(folder, engine.limits, num_blocks=40)
    settings.batch_invariant = True
    if options:
        settings.speculative_method = "ngram"
    return write_recording(target / "trace.binpb", engine.steps, snapshot=Snapshot(engine=settings))


def run(trace, folder, load=LoadedModel.load):
    report = []
    config = ReplayConfig.from_flags(
        trace=trace, model=folder, against="invariant", device="cpu", compilation_level=0
    )
    return replay(config, report.append, load=load), "\n".join(report)


@pytest.mark.parametrize(
    "options", [{}, {"num_speculative_tokens": 2, "lookup_sizes": (1, 3)}], ids=["plain", "drafts"]
)
def test_rows_alone_have_the_same_bits_in_the_mode(folder, tmp_path, options):
    totals, report = run(record(folder, tmp_path, **options), folder)
    assert totals.is_clean, report
    assert totals.num_exact == totals.num_steps > 10
    assert f"{totals.num_steps} steps against invariant: 0 by graphs" in report


def test_the_first_row_layer_and_tensor_with_other_bits_are_named(folder, tmp_path):
    def load(config):
        loaded = LoadedModel.load(config)

        def perturb(module, args):
            context = get_forward_context()
            queries = args[0].clone()
            if context.context.batch_size > 1:
                queries[context.attn_metadata.query_start_loc[2] - 1] *= 1 + 1e-6
            return (queries, *args[1:])

        loaded.model.model.layers[2].self_attn.attn.register_forward_pre_hook(perturb)
        return loaded

    totals, report = run(record(folder, tmp_path), folder, load)
    lines = report.splitlines()
    assert totals.first_difference == 1
    assert lines[0].startswith("step 1 differs: prompts and decodes of 5")
    assert lines[1].startswith("  first tensor: row ")
    assert ", layer 2 q, off by" in lines[1]
    assert "layer 1" not in report


def test_a_recording_without_the_mode_shows_what_depends_on_the_batch(folder, tmp_path):
    trace = record(folder, tmp_path)

    def load(config):
        loaded = LoadedModel.load(config)
        use_batch_invariance(is_on=False)
        return loaded

    totals, report = run(trace, folder, load)
    assert totals.num_different
    assert "first tensor: row " in report
