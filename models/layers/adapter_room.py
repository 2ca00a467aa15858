"""Room for low-rank adapters in a model's layers.

Each adapted layer has static buffers for as many adapters as may be used at the same time. A step
says which slot each token uses, so captured graphs hold no adapter, only the addresses of slots.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import torch

from models.layers.decoder import CausalLM
from models.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from models.layers.expert_room import ExpertRoom
from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear

AdaptedLayer: TypeAlias = QuantizableLinear | VocabParallelEmbedding | ExpertRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAdapter:
    """One adapter's share of a layer on this rank, of `rank` ranks.

    a: [parts, rank, K]; of the embedding [1, rank, tokens]. b: [N, rank], scaled. Those of experts
    have a first dimension more, [E, ...], of all experts if the room says which of them it holds.
    """

    layer: AdaptedLayer
    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """Rows of each A."""
        return self.b.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.a.nbytes + self.b.nbytes


def adapted_layers(model: CausalLM) -> Iterator[QuantizableLinear]:
    """Yields the layers of a model that can have adapters: no draft layers, no encoder."""
    drafts = model.model.layers[model.config.num_hidden_layers :]
    left_out = {module for layer in drafts for module in layer.modules()}
    for module in model.model.modules():
        if isinstance(module, QuantizableLinear) and module not in left_out:
            yield module


def experts_by_layer(model: CausalLM) -> dict[int, Experts]:
    """Returns the routed experts of this stage's layers, by the number of the layer."""
    return {
        number: module
        for number, layer in enumerate(model.model.layers[: model.config.num_hidden_layers])
        for module in layer.modules()
        if isinstance(module, Experts)
    }


def make_room(
    model: CausalLM,
    *,
    num_slots: int,
    max_rank: int,
    with_embeddings: bool = False,
    with_experts: bool = False,
    moves_experts: bool = False,
) -> None:
    """Gives a loaded model empty slots for adapters; moves_experts: see Experts.

    Raises:
        ValueError: experts can have none.
    """
    model.num_adapter_slots, model.max_adapter_rank = num_slots, max_rank
    device = next(model.parameters()).device
    like = torch.empty(0, dtype=model.dtype, device=device)
    for layer in adapted_layers(model):
        parts = layer.part_sizes
        layer.adapter_a = like.new_zeros(num_slots, len(parts) * max_rank, layer.num_inputs)
        layer.adapter_b = like.new_zeros(num_slots, sum(parts), max_rank)
    for experts in experts_by_layer(model).values() if with_experts else ():
        experts.make_adapter_room(num_slots, max_rank, like, moves=moves_experts)
    if with_embeddings and model.stage.is_first:
        table = model.model.embed_tokens
        num_tokens, size = table.weight.shape
        table.adapter_a = like.new_zeros(num_slots, num_tokens, max_rank)
        table.adapter_b = like.new_zeros(num_slots, size, max_rank)
        identity = torch.eye(max_rank, dtype=model.dtype, device=device)
        table.adapter_identity = identity.repeat(num_slots, 1, 1)
    if with_embeddings and model.stage.is_last:
        head = model.lm_head
        num_tokens, size = head.weight.shape
        head.adapter_a = like.new_zeros(num_slots, max_rank, size)
        head.adapter_b = like.new_zeros(num_slots, num_tokens, max_rank)


def fill_slot(share: LayerAdapter, slot: int) -> None:
    """Copies an adapter's share of a layer into a slot; on CUDA the copy is queued."""
    room_a, room_b = slot_of(share.layer, slot)
    if isinstance(share.layer, ExpertRoom) and share.layer.held is not None:
        fill_experts(share, slot, range(len(share.layer.held)))
    elif is_table(share.layer):
        _fill(room_a.T.unsqueeze(0), room_b, share.a, share.b)
    else:
        _fill(_by_part(room_a, share.a), room_b, share.a, share.b)


def fill_experts(share: LayerAdapter, slot: int, indices: Collection[int]) -> None:
    """Copies an adapter of some experts of a room into a slot.

    Args:
        share: with all experts.
        slot: of the adapter.
        indices: of the experts in the room, in order.
    """
    assert isinstance(share.layer, ExpertRoom), "the others have no experts"
    assert share.layer.held is not None, "host memory has all experts"
    room_a, room_b = slot_of(share.layer, slot)
    for index, expert, count in _runs(indices, share.layer.held):
        own, stored = slice(index, index + count), slice(expert, expert + count)
        _fill(_by_part(room_a[own], share.a), room_b[own], share.a[stored], share.b[stored])


def _runs(indices: Collection[int], held: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields first index, first expert and length of runs of neighbours in both orders."""
    for _, pairs in groupby(
        enumerate(indices), lambda each: (each[1] - each[0], held[each[1]] - each[0])
    ):
        (_, first), *others = pairs
        yield first, held[first], 1 + len(others)


def _by_part(room_a: torch.Tensor, stored_a: torch.Tensor) -> torch.Tensor:
    return room_a.view(*room_a.shape[:-2], stored_a.shape[-3], -1, room_a.shape[-1])


def _fill(room_a: torch.Tensor, room_b: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Copies factors into a slot of a larger rank; room_a: [..., parts, R, K]."""
    rank = b.shape[-1]
    room_a[..., :rank, :].copy_(a, non_blocking=True)
    room_a[..., rank:, :].zero_()
    room_b[..., :rank].copy_(b, non_blocking=True)
    room_b[..., rank:].zero_()


def clear_slot(layer: AdaptedLayer, slot: int) -> None:
    """Makes a slot of a layer add nothing."""
    slot_of(layer, slot)[1].zero_()


def slot_of(layer: AdaptedLayer, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the memory of a slot: A, [..., parts * R, K] or of a table [tokens, R], and B."""
    assert layer.adapter_a is not None, "the layer has room"
    assert layer.adapter_b is not None, "the layer has room"
    return layer.adapter_a[slot], layer.adapter_b[slot]


def is_table(layer: AdaptedLayer) -> bool:
    """Whether a layer looks tokens up, whose A has a row for each token."""
    return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
