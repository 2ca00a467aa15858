"""Steps before serving that run with adapters, as some steps of requests do."""

import pytest
import torch

from models.cudagraph_mode import GraphKind
from models.forward_context import GraphKey, get_forward_context
from models.layers.adapter_room import make_room
from models.loading.loader import load_model
from services.engine.limits import StepLimits
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.graph_setup import piece_graphs
from services.engine.worker.start.kv_memory import allocate_kv_cache, largest_step_bytes
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=16,
    block_size=4,
    vocab_size=97,
    num_adapter_slots=2,
)


@pytest.fixture
def runner(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    make_room(model, num_slots=2, max_rank=4)
    cache = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=torch.float32, device=CPU)
    return ModelRunner(model, cache, limits=LIMITS, device=CPU)


@pytest.fixture
def have_adapters(runner):
    """Whether each step, in order, ran with adapters."""
    found, run = [], runner.forward.run_model

    def watched(*inputs):
        found.append(get_forward_context().adapter_slots is not None)
        return run(*inputs)

    runner.forward.run_model = watched
    return found


def test_the_memory_of_the_largest_step_is_that_with_adapters(runner, have_adapters, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: len(have_adapters))
    assert largest_step_bytes(runner, LIMITS) == 2
    assert have_adapters == [False, True]


def test_graphs_of_pieces_are_tested_with_the_adapters_that_they_add(runner, have_adapters):
    family = runner.graph_families(piece_graphs(CPU, torch.float32))[GraphKind.PIECEWISE]
    family.warm_up(GraphKey(kind=GraphKind.PIECEWISE, num_tokens=8, graph_bs=0, max_q_len=0))
    assert have_adapters == [True]
