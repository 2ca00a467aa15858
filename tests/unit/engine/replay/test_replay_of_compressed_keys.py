"""Replays of models whose layers attend to entries of several tokens, with and without faults."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import get_forward_context
from services.engine.worker.start.loaded_model import LoadedModel
from tests.support.random_checkpoints import write_checkpoint
from tests.unit.engine.replay.test_replay import record, run


@pytest.fixture(scope="module", params=["deepseek_v4", "deepseek_v4_odd"])
def recorded(request, tmp_path_factory):
    """Returns the folder of a checkpoint, and a recording."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, request.param)
    return folder, record(folder, tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize("against", ["eager", "full", "piecewise"])
def test_an_honest_recording_shows_no_difference(recorded, against):
    folder, trace = recorded
    totals, report = run(trace, folder, against)
    assert totals.is_clean, report
    assert totals.num_by_graph == 0 if against == "eager" else totals.num_by_graph > 10


def test_changed_entries_show_in_the_output_of_their_layer(recorded):
    """A replay does not compare entries, so it is their readers that must show it."""

    def load(config):
        loaded = LoadedModel.load(config)
        layers = loaded.model.model.layers
        number = next(n for n, layer in enumerate(layers) if layer.self_attn.entries)
        bias = layers[number].self_attn.compressor.position_bias
        right, wrong = bias.clone(), bias + torch.linspace(0, 9, bias.numel()).view(bias.shape)

        def set_bias(value):
            if get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL:
                bias.copy_(value)

        attention = layers[number].self_attn
        attention.register_forward_pre_hook(lambda *_: set_bias(wrong))
        attention.register_forward_hook(lambda *_: set_bias(right))
        changed.append(number)
        return loaded

    changed: list[int] = []
    folder, trace = recorded
    totals, report = run(trace, folder, "full", load)
    assert not totals.is_clean
    assert f"first tensor: layer {changed[0]} attention output" in report
