"""A few layers are traced for all, and the result is what a trace of all layers gives."""

import copy
import json
from itertools import pairwise

import pytest
import torch

from models.loading.loader import load_model
from services.engine.compilation.compile_model import compile_traced
from services.engine.compilation.program.graph_signature import graph_signature
from services.engine.compilation.program.program import (
    LayerWeight,
    Weight,
    read_program,
    tensors_of,
)
from services.engine.compilation.trace.backend import trace_model
from services.engine.compilation.trace.layer_kinds import layers_to_trace
from services.engine.compilation.trace.tracing import drop_size_checks, trace_programs
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS
from tests.support.compilation import compilation_config
from tests.support.random_checkpoints import SHAPE, VARIANTS, write_checkpoint

EXAMPLES = [torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)]
SHAPES = {
    "qwen3": {"num_hidden_layers": 6},
    "gpt_oss": {"num_hidden_layers": 6},
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
    whole = trace_model(model, EXAMPLES)
    assert len(traced.trace.graph.graph.nodes) < 0.9 * len(whole.graph.graph.nodes)
    drop_size_checks(whole.graph.graph)
    every = read_program(whole, DEFAULT_SPLITTING_OPS)
    assert len(few.parts) == len(every.parts) == 2 * model.config.num_hidden_layers + 1
    for ours, theirs in zip(few.parts, every.parts, strict=True):
        assert graph_signature(ours.item.graph) == graph_signature(theirs.item.graph)
        assert resolved(ours.values, traced.layers) == resolved(theirs.values, traced.layers)
    assert few.result == every.result


DEPTHS = {"qwen3": (36, 3), "gpt_oss": (36, 3), "deepseek_v3": (61, 4)}
"""Layers of the largest model of a family, and its distinct pieces. Those of DeepSeek-V3 begin the
model, or follow attention of a dense layer, of an expert layer, or of the last one."""


def deep_model(folder, variant, num_layers):
    """Returns a model of tiny layers with random weights."""
    _, config_class, changes = VARIANTS[variant]
    own = {"num_hidden_layers": num_layers}
    if variant == "deepseek_v3":
        own["first_k_dense_replace"] = 3
    if variant == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        own["layer_types"] = [kinds[index % 2] for index in range(num_layers)]
    config_class(**copy.deepcopy({**SHAPE, **changes, **own})).save_pretrained(folder)
    path = folder / "config.json"
    architecture = {"architectures": [VARIANTS[variant][0].__name__]}
    path.write_text(json.dumps(json.loads(path.read_text()) | architecture))
    cpu = torch.device("cpu")
    return load_model(folder, device=cpu, dtype=torch.float32, load_format="dummy")


@pytest.mark.parametrize("variant", DEPTHS)
def test_neither_trace_nor_pieces_grow_with_depth(tmp_path, variant):
    num_layers, num_distinct = DEPTHS[variant]
    num_nodes = set()
    for count in (8, num_layers):
        (tmp_path / str(count)).mkdir()
        model = deep_model(tmp_path / str(count), variant, count)
        config = compilation_config(level=3, use_inductor=False)
        traced = trace_programs(model, config, example_inputs=EXAMPLES, max_num_tokens=64)
        ((_, program),) = traced.programs
        assert program.num_pieces == count + 1
        num_nodes.add(len(traced.trace.graph.graph.nodes))
        stats = compile_traced(traced, config, max_num_seqs=8).stats
        assert stats.num_pieces == num_distinct
    assert len(num_nodes) == 1


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
