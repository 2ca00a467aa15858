"""Reads the factors of routed experts in an adapter in PEFT's format.

PEFT has two forms. A factor may be of one projection of one expert, as experts are modules until
transformers 4: `experts.3.gate_proj.lora_A.weight`. Or it is of a parameter that stacks all experts
(`target_parameters`): A is [E * r, K], an expert after the other, and B is [N, r * E], a rank after
the other. The names do not say which parameter: PEFT wraps gate and up first, so that they are the
`base_layer` of down; where one alone is adapted, the configuration names it. Older releases store
the factors of the transposed matrix.

Source: PEFT 0.21.2, tuners/lora/layer.py (ParamWrapper) and tuners/tuners_utils.py.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from models.layers.adapter_room import LayerAdapter
from models.layers.expert_room import ExpertRoom
from models.layers.experts import Experts
from models.layers.weight import check_shape
from models.loading.adapter_config import AdapterConfig

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(?:\w+\.)?experts"
    r"(?:\.(?P<expert>\d+)\.(?P<projection>\w+)|(?P<inner>\.base_layer))?"
)
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModule:
    """A module of an adapter that is of routed experts.

    name: of the module. expert: its only one; None: all are stacked. projection: of the expert.
    is_inner: whether another adapted parameter wraps the stacked one.
    """

    name: str
    layer: int
    expert: int | None
    projection: str
    is_inner: bool

    @classmethod
    def parse(cls, name: str, own_name: str) -> "ExpertModule | None":
        """Returns a module; None if it is of another kind, or of no layer that makes tokens.

        Args:
            name: of the module.
            own_name: after models.loading.names.renamed.
        """
        match = _NAME.fullmatch(own_name)
        if match is None:
            return None
        return cls(
            name=name,
            layer=int(match["layer"]),
            expert=None if match["expert"] is None else int(match["expert"]),
            projection=match["projection"] or "",
            is_inner=match["inner"] is not None,
        )

    def parameter(self, config: AdapterConfig, *, is_alone: bool) -> str:
        """Returns the stacked parameter that the module adapts.

        is_alone: whether no other of the layer's is adapted.
        """
        adapts_down = "down_proj" in config.target_parameters or not config.target_parameters
        is_down = not self.is_inner and (adapts_down or not is_alone)
        return "down_proj" if is_down else "gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFactors:
    """The factors of a module of experts, checked: A [r, K] or [E * r, K], and B scaled."""

    module: ExpertModule
    parameter: str
    a: torch.Tensor
    b: torch.Tensor


def expert_shares(
    experts: Experts, factors: Iterable[ExpertFactors], empty: Callable[..., torch.Tensor]
) -> Iterator[LayerAdapter]:
    """Yields this rank's shares of a layer's products.

    Args:
        experts: of the layer.
        factors: of the layer.
        empty: returns zeros of a shape in host memory.

    Raises:
        ValueError: a factor does not fit.
    """
    gate_up_room, down_room = experts.gate_up_room, experts.down_room
    assert gate_up_room is not None, "the reader has checked it"
    assert down_room is not None, "the reader has checked it"
    gate_up: list[ExpertFactors] = []
    down: list[ExpertFactors] = []
    for each in factors:
        is_down = (each.module.projection or each.parameter) in (*_DOWN, "down_proj")
        (down if is_down else gate_up).append(each)
    if gate_up:
        yield _gate_up_share(experts, gate_up_room, gate_up, empty)
    if down:
        yield _down_share(experts, down_room, down, empty)


def by_layer(factors: Iterable[ExpertFactors]) -> dict[int, list[ExpertFactors]]:
    """Returns factors by the number of their layer."""
    groups: dict[int, list[ExpertFactors]] = defaultdict(list)
    for each in factors:
        groups[each.module.layer].append(each)
    return groups


def _gate_up_share(
    experts: Experts,
    room: ExpertRoom,
    factors: list[ExpertFactors],
    empty: Callable[..., torch.Tensor],
) -> LayerAdapter:
    num_outputs = sum(room.part_sizes) * experts.group.size
    rank = max(_rank_of(each, experts.num_experts) for each in factors)
    num_parts, held = len(room.part_sizes), list(experts.held)
    share_a = empty(len(held), num_parts, rank, room.num_inputs)
    share_b = nn.Parameter(empty(len(held), sum(room.part_sizes), rank), requires_grad=False)
    for each in factors:
        expert = _expert_of(each.module, experts.num_experts)
        if expert is None:
            a, b = _stacked(each, experts.num_experts, room.num_inputs, num_outputs)
            experts.weight_loader(share_b, _widened(b, rank), (None, 0))
            share_a[:, :, : a.shape[1]] = a[held].unsqueeze(1)
            continue
        part = _part_of(each.module, num_parts)
        check_shape(each.a, (len(each.a), room.num_inputs))
        experts.weight_loader(share_b, _widened(each.b, rank), (expert, part))
        if (slot := experts.slot_of(expert)) is not None:
            share_a[slot, part, : len(each.a)] = each.a
    return LayerAdapter(layer=room, a=share_a, b=share_b.detach())


def _down_share(
    experts: Experts,
    room: ExpertRoom,
    factors: list[ExpertFactors],
    empty: Callable[..., torch.Tensor],
) -> LayerAdapter:
    (num_outputs,), group = room.part_sizes, experts.group
    num_inputs, first = room.num_inputs * group.size, room.num_inputs * group.rank
    rank, held = max(_rank_of(each, experts.num_experts) for each in factors), list(experts.held)
    share_a = empty(len(held), 1, rank, room.num_inputs)
    share_b = empty(len(held), num_outputs, rank)
    for each in factors:
        expert = _expert_of(each.module, experts.num_experts)
        if expert is None:
            a, b = _stacked(each, experts.num_experts, num_inputs, num_outputs)
            share_a[:, 0, : a.shape[1]] = a[held][..., first : first + room.num_inputs]
            share_b.copy_(_widened(b[held], rank))
            continue
        check_shape(each.a, (len(each.a), num_inputs))
        check_shape(each.b, (num_outputs, each.b.shape[1]))
        if (slot := experts.slot_of(expert)) is not None:
            share_a[slot, 0, : len(each.a)] = each.a[:, first : first + room.num_inputs]
            share_b[slot] = _widened(each.b, rank)
    return LayerAdapter(layer=room, a=share_a, b=share_b)


def _rank_of(factors: ExpertFactors, num_experts: int) -> int:
    return len(factors.a) // (num_experts if factors.module.expert is None else 1)


def _expert_of(module: ExpertModule, num_experts: int) -> int | None:
    if module.expert is not None and module.expert >= num_experts:
        raise ValueError(f"it adapts {module.name}, and the layer has {num_experts} experts")
    return module.expert


def _part_of(module: ExpertModule, num_parts: int) -> int:
    if module.projection in _GATE and num_parts > 1:
        return 0
    if module.projection in _UP:
        return num_parts - 1
    raise ValueError(f"it adapts {module.name}, which the model does not have")


def _stacked(
    factors: ExpertFactors, num_experts: int, num_inputs: int, num_outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A [E, r, K] and B [E, N, r] of a parameter that stacks all experts."""
    rank = _rank_of(factors, num_experts)
    a = factors.a.view(num_experts, rank, factors.a.shape[1])
    b = factors.b.view(len(factors.b), rank, num_experts).permute(2, 0, 1)
    sizes = a.shape[2], b.shape[1]
    if sizes == (num_outputs, num_inputs) != (num_inputs, num_outputs):
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    elif sizes != (num_inputs, num_outputs):
        raise ValueError(
            f"{factors.module.name} has {sizes[0]} inputs and {sizes[1]} outputs; "
            f"{factors.parameter} of the model has {num_inputs} and {num_outputs}"
        )
    return a, b


def _widened(b: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns B with columns of zeros up to a rank."""
    wide = b.new_zeros(*b.shape[:-1], rank)
    wide[..., : b.shape[-1]] = b
    return wide
