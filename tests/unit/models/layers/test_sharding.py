"""The shards that ranks load put the whole layer together again."""

import pytest
import torch
from torch.nn import functional

from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from models.parallel.group import SINGLE, ParallelGroup

SIZE = 2
GROUPS = [ParallelGroup(rank=rank, size=SIZE) for rank in range(SIZE)]
torch_random = torch.Generator().manual_seed(7)


def random(*shape):
    return torch.randn(*shape, generator=torch_random)


def load(layer, **tensors):
    """Loads {"weight": [one tensor per shard id], "bias": ...}."""
    for name, shards in tensors.items():
        for shard_id, tensor in enumerate(shards):
            layer.weight_loader(getattr(layer, name), tensor, shard_id)
    return layer


def test_merged_column_shards_reassemble_each_projection():
    weights, biases, x = [random(8, 5), random(4, 5)], [random(8), random(4)], random(3, 5)
    outputs = [
        load(
            MergedColumnParallelLinear(5, [8, 4], bias=True, group=group),
            weight=weights,
            bias=biases,
        )(x).split((4, 2), dim=-1)
        for group in GROUPS
    ]
    for part, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        whole = torch.cat([output[part] for output in outputs], dim=-1)
        torch.testing.assert_close(whole, functional.linear(x, weight, bias))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (6, 1)])
def test_qkv_shards_hold_whole_heads_and_repeat_scarce_kv_heads(num_heads, num_kv_heads):
    head_dim, x = 4, random(3, 5)
    weights = [random(n * head_dim, 5) for n in (num_heads, num_kv_heads, num_kv_heads)]
    outputs = [
        load(
            QKVParallelLinear(5, head_dim, num_heads, num_kv_heads, bias=False, group=group),
            weight=weights,
        ).forward_heads(x)
        for group in GROUPS
    ]
    for part, weight in enumerate(weights):
        whole = functional.linear(x, weight).view(3, -1, head_dim)
        pieces = [output[part] for output in outputs]
        is_repeated = whole.shape[1] == 1
        expected = [whole] * SIZE if is_repeated else list(whole.chunk(SIZE, dim=1))
        torch.testing.assert_close(pieces, expected)


def test_row_shards_sum_to_the_whole():
    weight, x = random(5, 8), random(3, 8)
    layers = [
        load(RowParallelLinear(8, 5, bias=False, group=group), weight=[weight]) for group in GROUPS
    ]
    pieces = [
        functional.linear(part, layer.weight)
        for part, layer in zip(x.chunk(SIZE, dim=-1), layers, strict=True)
    ]
    torch.testing.assert_close(sum(pieces), functional.linear(x, weight))


@pytest.mark.parametrize("layer_class", [VocabParallelEmbedding, ParallelLMHead])
def test_vocabulary_shards_cover_every_row_and_pad_with_zeros(layer_class):
    weight = random(7, 3)
    shards = [load(layer_class(7, 3, group=group), weight=[weight]).weight for group in GROUPS]
    assert [len(shard) for shard in shards] == [4, 4]
    whole = torch.cat(list(shards))
    assert torch.equal(whole[:7], weight)
    assert not whole[7:].any()


def test_whole_tensor_of_the_wrong_shape_is_refused_even_if_its_shard_would_fit():
    layer = RowParallelLinear(8, 5, bias=True, group=GROUPS[0])
    with pytest.raises(ValueError, match=r"\(5, 4\); the model needs \(5, 8\)"):
        layer.weight_loader(layer.weight, torch.zeros(5, 4), 0)
    with pytest.raises(ValueError, match=r"\(1,\); the model needs \(5,\)"):
        layer.weight_loader(layer.bias, torch.zeros(1), 0)


def test_single_rank_row_layer_adds_its_bias():
    weight, bias, x = random(5, 8), random(5), random(3, 8)
    layer = load(RowParallelLinear(8, 5, bias=True, group=SINGLE), weight=[weight], bias=[bias])
    torch.testing.assert_close(layer(x), functional.linear(x, weight, bias))
