"""Names of checkpoint tensors, and the parameters they fill."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

from models.layers.weight import ExpertTensor, check_shape, empty_parameter
from models.llama import LlamaForCausalLM
from models.loading.names import find_destinations, is_past_the_last_layer, renamed

NUM_EXPERTS, HIDDEN, INNER = 3, 4, 2
LAYER = "model.layers.0.mlp."


class Experts(nn.Module):
    """Gate and up side by side, then down, of all experts."""

    def __init__(self):
        super().__init__()
        self.w13_weight = empty_parameter(NUM_EXPERTS, 2 * INNER, HIDDEN)
        self.w13_weight_scale = empty_parameter(NUM_EXPERTS, 2)
        self.w2_weight = empty_parameter(NUM_EXPERTS, HIDDEN, INNER)

    def weight_loader(self, param, loaded, shard_id):
        expert_id, part = shard_id
        if expert_id is None:
            check_shape(loaded, tuple(param.shape))
            param.copy_(loaded)
        elif param is self.w13_weight:
            param[expert_id, part * INNER : (part + 1) * INNER].copy_(loaded)
        elif param is self.w13_weight_scale:
            param[expert_id, part].copy_(loaded)
        else:
            param[expert_id].copy_(loaded)


class PerExpert(LlamaForCausalLM):
    """Experts that the checkpoint keeps one by one."""

    weights_mapping: ClassVar = {"block_sparse_moe": "mlp"}

    @classmethod
    def expert_mapping(cls, config):
        return [
            ExpertTensor(parameter, f"experts.{expert}.{stored}.weight", expert, part)
            for expert in range(NUM_EXPERTS)
            for parameter, stored, part in (
                ("experts.w13_weight", "gate_proj", 0),
                ("experts.w13_weight", "up_proj", 1),
                ("experts.w2_weight", "down_proj", 0),
            )
        ]


class Stacked(LlamaForCausalLM):
    """Experts that the checkpoint keeps in one tensor."""

    @classmethod
    def expert_mapping(cls, config):
        return [
            ExpertTensor("experts.w13_weight", "experts.gate_up_proj", None, 0),
            ExpertTensor("experts.w2_weight", "experts.down_proj", None, 0),
        ]


def with_experts(model_class, llama_config):
    """The model with one layer of a Llama's, which has experts."""
    model = model_class(dataclasses.replace(llama_config, num_hidden_layers=1))
    model.model.layers[0].mlp = nn.Module()
    model.model.layers[0].mlp.experts = Experts()
    return model


def fill(model, name, tensor):
    destination = find_destinations(model)[name]
    destination.layer.weight_loader(destination.param, tensor, destination.shard_id)


def test_each_experts_tensors_fill_their_share(llama_config):
    model = with_experts(PerExpert, llama_config)
    experts = model.model.layers[0].mlp.experts
    gate, up = torch.rand(INNER, HIDDEN), torch.rand(INNER, HIDDEN)
    fill(model, f"{LAYER}experts.2.gate_proj.weight", gate)
    fill(model, f"{LAYER}experts.2.up_proj.weight", up)
    assert torch.equal(experts.w13_weight[2], torch.cat([gate, up]))
    names = [name for name in find_destinations(model) if ".experts." in name]
    # Gate, up and down, and the scales of the parameter that has them.
    assert len(names) == NUM_EXPERTS * (3 + 2)


def test_scales_follow_the_weights_of_their_expert(llama_config):
    model = with_experts(PerExpert, llama_config)
    fill(model, f"{LAYER}experts.1.up_proj.weight_scale", torch.tensor(0.5))
    assert model.model.layers[0].mlp.experts.w13_weight_scale[1, 1] == 0.5


def test_one_tensor_may_stack_all_experts(llama_config):
    model = with_experts(Stacked, llama_config)
    stacked = torch.rand(NUM_EXPERTS, HIDDEN, INNER)
    fill(model, f"{LAYER}experts.down_proj", stacked)
    assert torch.equal(model.model.layers[0].mlp.experts.w2_weight, stacked)


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.layers.0.mlp.down.weight_scale_inv", "model.layers.0.mlp.down.weight_scale"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_stored_names_are_replaced_part_by_part(llama_config, stored, ours):
    assert renamed(stored, with_experts(PerExpert, llama_config)) == ours


@pytest.mark.parametrize(
    ("name", "is_past"),
    [
        ("model.layers.0.input_layernorm.weight", False),
        ("model.layers.1.input_layernorm.weight", True),
        ("model.layers.61.eh_proj.weight", True),
        ("model.norm.weight", False),
    ],
)
def test_layers_past_the_configured_number_are_distinguished(llama_config, name, is_past):
    assert is_past_the_last_layer(name, with_experts(PerExpert, llama_config)) is is_past
