"""EAGLE-3 heads against a plain computation, and their checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from models.config import ConfigError, ModelConfig
from models.cudagraph_mode import CUDAGraphMode
from models.eagle3_config import Eagle3Config
from models.loading.checkpoint import CheckpointError
from models.loading.draft_model import load_draft_model
from models.loading.loader import load_model
from services.engine.batch import GraphKind, read_int32
from tests.support.compilation import compilation_config
from tests.support.eagle3_checkpoints import DRAFT_VOCAB_SIZE, write_eagle3_head
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [70] * 17]
NUM_OUTPUT = 20
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss")
LIMITS = ({}, {"max_num_batched_tokens": 7}, {"num_blocks": 36, "max_num_batched_tokens": 16})
WAYS = (
    (2, CUDAGraphMode.NONE),
    (3, CUDAGraphMode.NONE),
    (0, CUDAGraphMode.PIECEWISE),
    (3, CUDAGraphMode.PIECEWISE),
    (0, CUDAGraphMode.FULL_AND_PIECEWISE),
    (2, CUDAGraphMode.FULL_AND_PIECEWISE),
    (3, CUDAGraphMode.FULL_AND_PIECEWISE),
)
"""Levels of compilation and modes of graphs."""


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("target")
    layers = {"num_hidden_layers": 4}
    if request.param == "gpt_oss":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 2
    write_checkpoint(folder, request.param, **layers)
    return folder


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    write_eagle3_head(folder, target, agrees=False, **LAYERS)
    return folder


def engine(target, head, num_drafts=3, config=None, **options):
    return GraphEngine(
        target,
        config or compilation_config(),
        num_speculative_tokens=num_drafts,
        draft_model=head if num_drafts else None,
        **options,
    )


def drafts(engine):
    return [read_int32(result.draft_token_ids).tolist() for _, result in engine.steps]


class PlainHead:
    """The head as its paper writes it, on whole sequences."""

    def __init__(self, folder):
        self.tensors = load_file(folder / "model.safetensors")

    def norm(self, x, name):
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
        return x * scale * self.tensors[name + ".weight"]

    def project(self, x, name):
        return x @ self.tensors[name + ".weight"].T

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def __call__(self, embedded, hidden, positions):
        """Maps T embeddings and states, with causal attention among them, to states."""
        prefix = "midlayer."
        joined = torch.cat(
            (
                self.norm(embedded, prefix + "input_layernorm"),
                self.norm(hidden, prefix + "hidden_norm"),
            ),
            -1,
        )
        q, k, v = (
            self.project(joined, f"{prefix}self_attn.{name}_proj").unflatten(-1, (-1, 8))
            for name in "qkv"
        )
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        mixed = functional.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in (q, k, v)), is_causal=True
        ).transpose(0, 1)
        hidden = hidden + self.project(mixed.flatten(1), prefix + "self_attn.o_proj")
        normed = self.norm(hidden, prefix + "post_attention_layernorm")
        gated = functional.silu(self.project(normed, prefix + "mlp.gate_proj"))
        inner = gated * self.project(normed, prefix + "mlp.up_proj")
        return hidden + self.project(inner, prefix + "mlp.down_proj")


def test_the_first_draft_is_that_of_the_plain_computation(target, head):
    """The prompt's step: what the head makes of the model's layers and the token after each."""
    running = engine(target, head, 1)
    seen = []
    running.runner.watch_outputs(lambda hidden, logits: seen.append(hidden.clone()))
    [output] = running.run([PROMPTS[1]], 1)
    size = running.model.config.hidden_size
    states = seen[0][:, size:]
    assert states.shape == (len(PROMPTS[1]), 3 * size)
    plain = PlainHead(head)
    tokens = torch.tensor([*PROMPTS[1][1:], output[0]])
    embedded = running.model.model.embed_tokens(tokens)
    made = plain(embedded, plain.project(states, "fc"), torch.arange(len(tokens)))
    logits = plain.project(plain.norm(made[-1], "norm"), "lm_head")
    shift = running.model.config.vocab_size - DRAFT_VOCAB_SIZE
    assert drafts(running)[0] == [int(logits.argmax()) + shift]


@pytest.mark.parametrize(
    ("target", "options", "temperature"),
    # Every two of a family, limits and a temperature.
    [
        (family, options, (at + number) % 2)
        for at, family in enumerate(FAMILIES)
        for number, options in enumerate(LIMITS)
    ]
    # Its prompts in chunks differ in last bits, which may decide between random tokens.
    + [("qwen3_5", options, 0) for options in LIMITS],
    indirect=["target"],
    ids=str,
)
def test_tokens_are_those_of_a_run_without(target, head, options, temperature):
    expected = engine(target, head, 0, **options).run(PROMPTS, NUM_OUTPUT, temperature=temperature)
    speculating = engine(target, head, **options)
    assert speculating.run(PROMPTS, NUM_OUTPUT, temperature=temperature) == expected


@pytest.fixture(scope="module")
def eager(target, head):
    """The output of eager steps, and their drafts."""
    running = engine(target, head)
    return running.run(PROMPTS, NUM_OUTPUT), drafts(running)


def test_graphs_draft_what_eager_steps_draft(target, head, eager):
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
    )
    by_graph = engine(target, head, config=config)
    assert {outcome.fault for outcome in by_graph.capture()} == {""}
    assert (by_graph.run(PROMPTS, NUM_OUTPUT), drafts(by_graph)) == eager
    assert any(result.drafted_by_graph for _, result in by_graph.steps)


@pytest.mark.parametrize(
    ("target", "level", "mode"),
    # The family with the most kinds of layers in every way, the others as fused as they become.
    [("gpt_oss", *way) for way in WAYS]
    + [(family, *WAYS[-1]) for family in (*FAMILIES[:-1], "qwen3_5")],
    indirect=["target"],
    ids=str,
)
def test_every_level_and_graph_drafts_what_eager_steps_draft(target, head, eager, level, mode):
    config = compilation_config(
        level=level,
        cudagraph_mode=mode,
        use_inductor=False,
        cudagraph_capture_sizes=(4, 32) if mode else None,
    )
    compiled = engine(target, head, config=config)
    assert {outcome.fault for outcome in compiled.capture()} <= {""}
    assert (compiled.run(PROMPTS, NUM_OUTPUT), drafts(compiled)) == eager
    kinds = {descriptor.graph_key.kind for descriptor, _ in compiled.steps}
    if mode:
        assert GraphKind.GRAPH_KIND_PIECEWISE in kinds
    if mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        assert any(result.drafted_by_graph for _, result in compiled.steps)


def config_of(head, target, **changes):
    values = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(values | changes))
    return Eagle3Config.from_folder(head, ModelConfig.from_folder(target))


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    write_checkpoint(folder, "llama", num_hidden_layers=8)
    write_eagle3_head(tmp_path / "head", folder)
    return folder, tmp_path / "head"


def test_layers_are_the_configs_or_the_usual_ones(llama):
    target, head = llama
    assert config_of(head, target).aux_layers == (1, 3, 4)
    named = {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}
    assert config_of(head, target, eagle_config=named).aux_layers == (0, 2, 7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 8, 1]}}, "3 layers from 0 to 7"),
        ({"hidden_size": 64}, "the model's is 32"),
        ({"vocab_size": 98}, "the model has 97"),
        ({"draft_vocab_size": 98}, "at most vocab_size"),
    ],
)
def test_a_head_of_another_model_is_refused(llama, changes, reason):
    target, head = llama
    with pytest.raises(ConfigError, match=reason):
        config_of(head, target, **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "the first is fc.weight"),
        (lambda tensors: tensors.pop("d2t"), "d2t is missing"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "more is unknown"),
        (lambda tensors: tensors["d2t"].add_(1), "out of the vocabulary"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), "norm.weight"),
    ],
)
def test_a_damaged_head_is_refused(llama, change, reason):
    target, head = llama
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")
    model = load_model(target, device=CPU, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=reason):
        load_draft_model(head, model, device=CPU, dtype=torch.float32, max_positions=64)


def test_a_model_of_transformers_cannot_have_a_head(llama):
    target, head = llama
    model = load_model(target, device=CPU, dtype=torch.float32, model_impl="transformers")
    with pytest.raises(ConfigError, match="needs --model-impl octavo"):
        load_draft_model(head, model, device=CPU, dtype=torch.float32, max_positions=64)
