from dataclasses import replace

import pytest
import torch

from models.config import ModelConfig
from models.config_sections.families import FAMILIES_OF_EXPERTS
from models.gpt_oss import GptOssExperts
from models.layers.experts import Experts
from models.layers.moe import FusedMoE
from models.parallel.collectives import without_other_ranks
from models.parallel.group import ParallelGroup
from models.registry import model_class

SIZE = 2
GROUPS = [ParallelGroup(rank=rank, size=SIZE) for rank in range(SIZE)]


@pytest.fixture
def config(checkpoint):
    return ModelConfig.from_folder(checkpoint("qwen3_moe")[0])


def random_like(param):
    return torch.randn(param.shape)


def test_ranks_outputs_sum_to_the_whole_layers(config):
    whole = FusedMoE(config, ParallelGroup(), experts=biased(config, ParallelGroup()))
    for param in whole.parameters():
        param.copy_(random_like(param))
    parts = []
    for rank in range(SIZE):
        group = ParallelGroup(rank=rank, size=SIZE)
        part = FusedMoE(config, group, experts=biased(config, group))
        part.gate.weight.copy_(whole.gate.weight)
        for name, param in part.experts.named_parameters():
            part.experts.weight_loader(param, getattr(whole.experts, name), 0)
        parts.append(part)
    hidden = torch.randn(9, config.hidden_size)
    with without_other_ranks():
        total = sum(part(hidden) for part in parts)
    torch.testing.assert_close(total, whole(hidden), rtol=1e-4, atol=1e-3)


def biased(config, group):
    return Experts(config.hidden_size, config.moe, bias=True, group=group)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"rank{group.rank}")
def test_experts_one_by_one_fill_the_same_tensors_as_all_at_once(config, group):
    moe = config.moe
    gate_up = torch.randn(moe.num_experts, 2 * moe.intermediate_size, config.hidden_size)
    down = torch.randn(moe.num_experts, config.hidden_size, moe.intermediate_size)
    at_once, single = (Experts(config.hidden_size, moe, bias=False, group=group) for _ in range(2))
    at_once.weight_loader(at_once.gate_up_proj, gate_up, (None, 0))
    at_once.weight_loader(at_once.down_proj, down, 0)
    for expert in range(moe.num_experts):
        for part, tensor in enumerate(gate_up[expert].chunk(2)):
            single.weight_loader(single.gate_up_proj, tensor, (expert, part))
        single.weight_loader(single.down_proj, down[expert], (expert, 0))
    assert torch.equal(at_once.gate_up_proj, single.gate_up_proj)
    assert torch.equal(at_once.down_proj, single.down_proj)


def test_expert_of_the_wrong_shape_is_refused(config):
    layer = Experts(config.hidden_size, config.moe, bias=False, group=GROUPS[0])
    for param, shard_id in ((layer.gate_up_proj, (1, 1)), (layer.down_proj, (1, 0))):
        with pytest.raises(ValueError, match="its shape is"):
            layer.weight_loader(param, torch.zeros(3, 5), shard_id)
    oss = GptOssExperts(config.hidden_size, config.moe, bias=True, group=GROUPS[0])
    for param in oss.parameters():
        with pytest.raises(ValueError, match="its shape is"):
            oss.weight_loader(param, torch.zeros(3, 5, 7, 1), 0)


def test_a_model_of_experts_without_any_in_its_config_is_refused(config):
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM needs experts"):
        FusedMoE(replace(config, moe=None), ParallelGroup())


@pytest.mark.parametrize("architecture", sorted(FAMILIES_OF_EXPERTS))
def test_no_family_of_experts_builds_a_dense_layer(config, architecture):
    dense = replace(config, moe=None, architecture=architecture)
    with pytest.raises(ValueError, match=f"{architecture} needs experts"):
        model_class(architecture).make_feed_forward(dense, 0, ParallelGroup())
