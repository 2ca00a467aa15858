"""Plans for each stored tensor: loaded, decoded, passed over or refused."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.layers.weight import ExpertTensor, check_shape, empty_parameter
from models.llama import LlamaForCausalLM
from models.loading.checkpoint import SINGLE_FILE, CheckpointError, open_checkpoint
from models.loading.dequantize import dequantize_mxfp4
from models.loading.plan import plan_loads
from models.loading.stored_tensors import by_model_name
from models.loading.weights import load_weights
from models.quantization.config import QuantizationConfig, WeightScheme

CPU = torch.device("cpu")
NUM_EXPERTS, HIDDEN, INNER = 2, 32, 64
STACKED = "model.layers.0.mlp.experts.gate_up_proj"
MXFP4 = QuantizationConfig(method="mxfp4", schemes=(WeightScheme(kind="mxfp4"),))
FP8_ROWS = QuantizationConfig(method="fp8", schemes=(WeightScheme(kind="fp8"),))


class Experts(nn.Module):
    """One matrix per expert, stored stacked or one by one."""

    def __init__(self):
        super().__init__()
        self.weight = empty_parameter(NUM_EXPERTS, HIDDEN, INNER)

    def weight_loader(self, param, loaded, shard_id):
        expert_id, _ = shard_id
        target = param if expert_id is None else param[expert_id]
        check_shape(loaded, tuple(target.shape))
        target.copy_(loaded)


class Stacked(LlamaForCausalLM):
    """All experts in one tensor, as gpt-oss stores them."""

    weights_mapping: ClassVar = {"transformer.": "model."}

    @classmethod
    def expert_mapping(cls, config):
        return [ExpertTensor("experts.weight", "experts.gate_up_proj", None, 0)]


class PerExpert(LlamaForCausalLM):
    """A tensor for each expert."""

    @classmethod
    def expert_mapping(cls, config):
        return [
            ExpertTensor("experts.weight", f"experts.{expert}.up_proj.weight", expert, 0)
            for expert in range(NUM_EXPERTS)
        ]


@pytest.fixture
def make_model(llama_config):
    """Returns a function from a class and a quantisation to a model of one layer with experts."""

    def make(model_class, quantization):
        config = dataclasses.replace(llama_config, num_hidden_layers=1, quantization=quantization)
        model = model_class(config)
        model.model.layers[0].mlp = nn.Module()
        model.model.layers[0].mlp.experts = Experts()
        return model

    return make


@pytest.fixture
def load(make_model, checkpoint, tmp_path):
    """Returns a function that loads a model from a Llama's other tensors and those given."""
    source, _ = checkpoint("llama")

    def load(tensors, model_class=Stacked, quantization=MXFP4):
        model = make_model(model_class, quantization)
        kept = {
            tensor.name: tensor.values.clone()
            for tensor in open_checkpoint(source)
            if ".mlp." not in tensor.name and "layers.1." not in tensor.name
        }
        save_file(kept | tensors, tmp_path / SINGLE_FILE)
        stored = by_model_name(open_checkpoint(tmp_path), model)
        load_weights(plan_loads(stored, {}, model, torch.float32), CPU, lambda line: None)
        return model.model.layers[0].mlp.experts.weight

    return load


def mxfp4():
    blocks = torch.randint(256, (NUM_EXPERTS, INNER, HIDDEN // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(120, 130, blocks.shape[:-1], dtype=torch.uint8)


def test_stacked_experts_load_as_they_are(load):
    stacked = torch.rand(NUM_EXPERTS, HIDDEN, INNER)
    assert torch.equal(load({STACKED: stacked}, quantization=None), stacked)


def test_stacked_experts_load_from_mxfp4_blocks(load):
    blocks, scales = mxfp4()
    loaded = load({f"{STACKED}_blocks": blocks, f"{STACKED}_scales": scales})
    assert torch.equal(loaded, dequantize_mxfp4(blocks, scales, torch.float32))


def test_renames_come_before_everything_else(load):
    blocks, scales = mxfp4()
    name = STACKED.replace("model.", "transformer.", 1)
    loaded = load({f"{name}_blocks": blocks, f"{name}_scales": scales})
    assert torch.equal(loaded, dequantize_mxfp4(blocks, scales, torch.float32))


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"),
    [
        ({"_blocks": 0}, MXFP4, "gate_up_proj_scales are missing"),
        ({"_scales": 1}, MXFP4, "gate_up_proj"),
        ({"_blocks": 1, "_scales": 1}, MXFP4, "MXFP4 blocks are uint8"),
        ({"_blocks": 0, "_scales": 0}, MXFP4, "its scales are"),
        ({"_blocks": 0, "_scales": 1}, None, "says nothing of mxfp4"),
        ({"_blocks": 0, "_scales": 1}, FP8_ROWS, "says nothing of mxfp4"),
    ],
)
def test_mxfp4_that_is_incomplete_is_refused(load, tensors, quantization, message):
    parts = mxfp4()
    stored = {STACKED + suffix: parts[part].clone() for suffix, part in tensors.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        load(stored, quantization=quantization)
    assert SINGLE_FILE in str(caught.value)


def test_fp8_experts_without_fp8_parameters_are_dequantised(load):
    weights = [torch.randn(HIDDEN, INNER).to(torch.float8_e4m3fn) for _ in range(NUM_EXPERTS)]
    scales = [torch.rand(HIDDEN, 1) for _ in range(NUM_EXPERTS)]
    tensors = {}
    for expert in range(NUM_EXPERTS):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj"
        tensors[f"{name}.weight"] = weights[expert]
        tensors[f"{name}.weight_scale"] = scales[expert]
        tensors[f"{name}.input_scale"] = torch.tensor(2.0)
    loaded = load(tensors, PerExpert, FP8_ROWS)
    for expert in range(NUM_EXPERTS):
        assert torch.equal(loaded[expert], weights[expert].float() * scales[expert])


def test_a_missing_expert_is_named(load):
    tensors = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.rand(HIDDEN, INNER)}
    with pytest.raises(CheckpointError, match=r"missing, .*experts\.1\.up_proj\.weight"):
        load(tensors, PerExpert, None)


def test_draft_layers_are_passed_over_and_others_are_not(load):
    stacked = {STACKED: torch.rand(NUM_EXPERTS, HIDDEN, INNER)}
    load(stacked | {"model.layers.1.eh_proj.weight": torch.rand(2, 2)}, quantization=None)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.eh_proj\.weight"):
        load(stacked | {"model.layers.0.eh_proj.weight": torch.rand(2, 2)}, quantization=None)


def test_scales_of_activations_belong_to_fp8_weights(load):
    stacked = {STACKED: torch.rand(NUM_EXPERTS, HIDDEN, INNER)}
    extra = {"model.layers.0.self_attn.q_proj.input_scale": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match=r"no tensor .*q_proj\.input_scale"):
        load(stacked | extra, quantization=FP8_ROWS)


@pytest.mark.parametrize(
    "name", ["k_scale", "attn.v_scale", "k_proj.k_scale", "v_proj.output_scale"]
)
def test_scales_measured_for_a_cache_are_passed_over(load, name):
    stacked = {STACKED: torch.rand(NUM_EXPERTS, HIDDEN, INNER)}
    load(stacked | {f"model.layers.0.self_attn.{name}": torch.tensor(0.5)}, quantization=None)
    with pytest.raises(CheckpointError, match="no tensor"):
        load(stacked | {f"model.layers.0.mlp.{name}": torch.tensor(0.5)}, quantization=None)
