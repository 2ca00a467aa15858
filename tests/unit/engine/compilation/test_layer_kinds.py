"""A few layers are traced for all, and the result is what a trace of all layers gives."""

from itertools import pairwise

import pytest
import torch

from models.loading.loader import load_model
from services.engine.compilation.backend import trace_model
from services.engine.compilation.graph_signature import graph_signature
from services.engine.compilation.layer_kinds import layers_to_trace
from services.engine.compilation.program import LayerWeight, Weight, read_program, tensors_of
from services.engine.compilation.size_checks import drop_size_checks
from services.engine.compilation.tracing import trace_programs
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS
from tests.support.compilation import compilation_config
from tests.support.random_checkpoints import write_checkpoint

EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
SHAPES = {
    "qwen3": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 8},
    "glm4_moe_groups": {"num_hidden_layers": 7},
    "deepseek_v3": {"num_hidden_layers": 7},
}


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("aaaaaaaa", [0, 1, 2]),
        ("dddmmmmmmm", [0, 1, 2, 3, 4]),
        ("dmmmmmmm", [0, 1, 2]),
        ("abababababab", [0, 1, 2, 3]),
        ("aaabaaabaaab", [0, 1, 2, 3, 4, 5, 7]),
        ("aaa", None),
        ("abcd", None),
    ],
)
def test_the_traced_layers_show_every_pair_of_neighbours(kinds, chosen):
    indices = layers_to_trace(kinds)
    if chosen is None:
        assert indices is None
        return
    assert indices is not None
    few = [kinds[index] for index in indices]
    assert few[:2] == list(kinds[:2])
    assert few[-1] == kinds[-1]
    assert set(pairwise(few[1:])) == set(pairwise(kinds[1:]))
    assert len(set(indices)) == len(indices) <= len(chosen)


@pytest.mark.parametrize("variant", SHAPES)
def test_repeated_parts_are_those_of_a_trace_of_all_layers(tmp_path, variant):
    write_checkpoint(tmp_path, variant, **SHAPES[variant])
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    traced = trace_programs(
        model,
        compilation_config(level=3, use_inductor=False, passes=[]),
        example_inputs=EXAMPLES,
        max_num_tokens=64,
    )
    ((_, few),) = traced.programs
    assert len(traced.trace.graph.graph.nodes) < 0.9 * len(
        trace_model(model, EXAMPLES).graph.graph.nodes
    )
    whole = trace_model(model, EXAMPLES)
    drop_size_checks(whole.graph.graph)
    every = read_program(whole, DEFAULT_SPLITTING_OPS)
    assert len(few.parts) == len(every.parts) == 2 * model.config.num_hidden_layers + 1
    for ours, theirs in zip(few.parts, every.parts, strict=True):
        assert graph_signature(ours.item.graph) == graph_signature(theirs.item.graph)
        assert resolved(ours.values, traced.layers) == resolved(theirs.values, traced.layers)
    assert few.result == every.result


def resolved(values, layers):
    """Returns values with each weight as its address."""

    def plain(value):
        match value:
            case Weight(tensor):
                return tensor.data_ptr()
            case LayerWeight(layer, name):
                return tensors_of(layers[layer])[name].data_ptr()
        return value

    return [plain(value) for value in values]
