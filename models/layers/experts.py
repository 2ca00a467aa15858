"""The weights of routed experts: their share on a rank, their formats, and how they are filled."""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from models.batch_invariance import is_batch_invariant
from models.config_sections.moe import MoeConfig
from models.layers.expert_room import ExpertRoom
from models.layers.quantization import FLOAT_GROUPS, Packing
from models.layers.weight import ShardId, check_shape, empty_parameter
from models.number_formats import BLOCK, FP8, MXFP4, MXFP4_RUN
from models.operands.packed_weights import RUN, to_kernel_order
from models.operands.run_scales import COLUMNS, entry_group, fill_tiled, tiled_shape
from models.parallel.expert_balance import moves_between
from models.parallel.expert_placement import ExpertPlacement
from models.parallel.group import SINGLE, ParallelGroup
from models.parallel.slots import copy_slot, exchange

Shape = tuple[int, ...]


class Experts(nn.Module):
    """The weights of routed experts, stacked.

    Each rank holds a share of every expert or, with expert parallelism, some whole ones. `ranks`
    share the layer, `group` an expert.
    gate_up_proj: [E, 2 * I / ranks, H], gate before up; its bias [E, 2 * I / ranks] or None.
        Experts without gates have up alone, [E, I / ranks, H].
    down_proj: [E, H, I / ranks]; its bias [E, H] or None.
    Weights kept in 8 or 4 bits have scales and other shapes: see models.ops.experts.expert_formats.
    packing: of weights that come one expert at a time in 4 bits, already in the order of kernels;
        None for others.
    gate_up_room, down_room: room for low-rank adapters; None without any.
    placement: of whole experts; None where every rank has a share of all. Then expert_map and
        expert_load are those of models.ops.experts.expert_parallel.
    """

    expert_map: torch.Tensor
    expert_load: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        *,
        bias: bool,
        group: ParallelGroup,
        has_gate: bool = True,
    ) -> None:
        super().__init__()
        self.num_parts = 2 if has_gate else 1
        count = moe.num_experts
        group = group.of_experts
        self.placement: ExpertPlacement | None = None
        self.ranks = group
        if group.enable_expert_parallel and group.size > 1:
            placement = ExpertPlacement.first(count, group.size, group.num_redundant_experts)
            self.placement = placement
            # Copies would share tokens by their place in the batch, and ranks add up by copy.
            uses_copies = not is_batch_invariant()
            chosen = torch.tensor(
                placement.expert_map(group.rank, uses_copies=uses_copies), dtype=torch.int32
            )
            self.register_buffer("expert_map", chosen, persistent=False)
            load = torch.zeros(count, dtype=torch.int64)
            self.register_buffer("expert_load", load, persistent=False)
            count, group = placement.num_local, SINGLE
        self.group = group
        self._local_size = group.split(moe.intermediate_size, "inner features of an expert")
        num_rows = self.num_parts * self._local_size
        self.gate_up_proj = empty_parameter(count, num_rows, hidden_size)
        self.down_proj = empty_parameter(count, hidden_size, self._local_size)
        self.gate_up_proj_bias = empty_parameter(count, num_rows) if bias else None
        self.down_proj_bias = empty_parameter(count, hidden_size) if bias else None
        self.gate_up_proj_scale: nn.Parameter | None = None
        self.down_proj_scale: nn.Parameter | None = None
        self.packing: Packing | None = None
        self.gate_up_room: ExpertRoom | None = None
        self.down_room: ExpertRoom | None = None

    @property
    def num_experts(self) -> int:
        """Experts of the layer on all ranks."""
        return len(self.down_proj) if self.placement is None else self.placement.num_experts

    @property
    def held(self) -> Sequence[int]:
        """The experts of which this rank has a share, in the order of its slots."""
        if self.placement is None:
            return range(len(self.down_proj))
        return self.placement.experts_of(self.ranks.rank)

    @property
    def adapter_arguments(self) -> Sequence[torch.Tensor]:
        """The last arguments of operators; none without room for adapters."""
        return [each for room in self.rooms for each in room.tensors]

    @property
    def rooms(self) -> Sequence[ExpertRoom]:
        """Both rooms for adapters, or none."""
        return [room for room in (self.gate_up_room, self.down_room) if room is not None]

    def on_one_rank(self) -> "Experts":
        """Returns the same experts as if this rank held all, for tensors with a place for each."""
        alone = copy.copy(self)
        alone.ranks = SINGLE
        alone.placement = ExpertPlacement.first(self.num_experts, SINGLE.size)
        return alone

    def make_adapter_room(
        self, num_slots: int, max_rank: int, like: torch.Tensor, *, moves: bool
    ) -> None:
        """Makes empty slots for adapters of this rank's experts, in the dtype and place of `like`.

        moves: whether experts move between ranks while serving.

        Raises:
            ValueError: gate and up would share a block of scales in one product.
        """
        num_rows = self.num_parts * self._local_size
        is_by_block = self.gate_up_proj_scale is not None and (
            self.gate_up_proj_scale.shape[1:] != (num_rows, 1)
        )
        if is_by_block and self.down_proj.dtype == FP8 and self._local_size % BLOCK:
            raise ValueError(
                "--lora-experts does not work with FP8 experts that have scales for parts of a "
                f"block: {self._local_size} inner features of {BLOCK}"
            )
        count, size = self.down_proj.shape[:2]
        parts, inner = (self._local_size,) * self.num_parts, self._local_size
        room = partial(ExpertRoom, num_slots=num_slots, max_rank=max_rank, like=like)
        self.gate_up_room = room(count, parts, size)
        self.down_room = room(count, (size,), inner)
        if moves:
            for each in self.rooms:
                each.held = self.held

    def can_keep_fp8(self, block_size: tuple[int, int] | None) -> bool:
        """Returns whether weights with such scales may stay FP8: no rank may hold part of one."""
        is_whole = self.group.size == 1 or self._local_size % BLOCK == 0
        return block_size is None or (block_size == (BLOCK, BLOCK) and is_whole)

    def keep_fp8(self, block_size: tuple[int, int] | None) -> None:
        """Makes the weights FP8 with scales by block or row; call before they have values."""
        count, hidden_size, inner = self.down_proj.shape
        hidden_blocks, inner_blocks = -(-hidden_size // BLOCK), -(-inner // BLOCK)
        num_rows = self.num_parts * inner
        gate_up_scale, down_scale = (num_rows, 1), (hidden_size, 1)
        if block_size is not None:
            gate_up_scale = self.num_parts * inner_blocks, hidden_blocks
            down_scale = hidden_blocks, inner_blocks
        self._keep(
            FP8,
            (count, num_rows, hidden_size),
            (count, hidden_size, inner),
            torch.float32,
            (count, *gate_up_scale),
            (count, *down_scale),
        )

    def can_keep_mxfp4(self) -> bool:
        """Returns whether weights may stay MXFP4: no row or share may end within a run."""
        return not any(size % MXFP4_RUN for size in (self.down_proj.shape[1], self._local_size))

    def keep_mxfp4(self) -> None:
        """Makes the weights packed MXFP4 with scales by run; call before they have values."""
        count, hidden_size, inner = self.down_proj.shape
        num_rows = self.num_parts * inner
        self._keep(
            MXFP4,
            (count, num_rows, hidden_size // 2),
            (count, hidden_size, inner // 2),
            MXFP4,
            (count, *tiled_shape(num_rows, hidden_size)),
            (count, *tiled_shape(hidden_size, inner)),
        )

    def can_keep_packed(self, packing: Packing) -> bool:
        """Returns whether weights that come one expert at a time may stay in 4 bits.

        Integers of 8 bits have no products of experts. No row or share may end within a run, and
        columns are in order: experts would each sort their inputs otherwise.
        """
        group = packing.group if packing.kind == "int4" else None
        sizes = self.down_proj.shape[1], self._local_size, group or RUN
        is_able = packing.kind != "int8" and not packing.has_order
        return is_able and not any(size % RUN for size in sizes)

    def keep_packed(self, packing: Packing) -> None:
        """Makes the weights floats or integers of 4 bits; call before they have values."""
        self.packing = packing
        if packing.kind == "mxfp4":
            self.keep_mxfp4()
            return
        count, hidden_size, inner = self.down_proj.shape
        num_rows = self.num_parts * inner
        scale_dtype, group = torch.bfloat16, FLOAT_GROUPS["nvfp4"]
        if packing.kind == "int4":
            scale_dtype = torch.int32
            # A rank's share may end within a group, whose words then are those of smaller groups.
            group = entry_group(math.gcd(packing.group or 0, hidden_size, inner))
        self._keep(
            torch.uint8,
            (count, num_rows, hidden_size // 2),
            (count, hidden_size, inner // 2),
            scale_dtype,
            (count, *tiled_shape(num_rows, hidden_size, group)),
            (count, *tiled_shape(hidden_size, inner, group)),
        )

    @property
    def columns_per_scale(self) -> int:
        """Columns of a row of 4-bit weights that share a scale, or a scale and a zero point."""
        assert self.down_proj_scale is not None, "weights of 4 bits have scales"
        return COLUMNS // self.down_proj_scale.shape[-1]

    def _keep(self, dtype: torch.dtype, gate_up: Shape, down: Shape, scale_dtype: torch.dtype,
              gate_up_scale: Shape, down_scale: Shape) -> None:  # fmt: skip
        """Replaces the weights by parameters of other dtypes and shapes, and adds scales."""

        def parameter(shape: Shape, dtype: torch.dtype) -> nn.Parameter:
            values = torch.empty(shape, dtype=dtype, device=self.down_proj.device)
            return nn.Parameter(values, requires_grad=False)

        self.gate_up_proj = parameter(gate_up, dtype)
        self.gate_up_proj_scale = parameter(gate_up_scale, scale_dtype)
        self.down_proj_scale = parameter(down_scale, scale_dtype)
        self.down_proj = parameter(down, dtype)

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share of one expert's tensor, or of a tensor of all experts.

        `loaded` is laid out like param, over all ranks; one expert's may lack the first dimension.
        shard_id is (expert, 0 for gate or down, 1 for up); anything else means all experts.
        """
        expert, part = shard_id if isinstance(shard_id, tuple) else (None, 0)
        if expert is None or loaded.dim() == len(self.stored_shape(param, param)):
            for target, own in self.stacked(param, loaded, expert):
                self._load(param, target, own, range(self.num_parts))
            return
        slot = self.slot_of(expert)
        if slot is not None:
            self._load(param, param[slot], loaded, (part,))

    def slot_of(self, expert: int) -> int | None:
        """Returns where this rank holds an expert; None if it does not."""
        if self.placement is None:
            return expert
        experts = self.placement.experts_of(self.ranks.rank)
        return experts.index(expert) if expert in experts else None

    def place(self, placement: ExpertPlacement) -> Sequence[int]:
        """Moves whole experts between ranks; all ranks call it between the same two steps.

        Returns this rank's slots with another expert than before. Adapters in their rooms are those
        of the experts before.
        """
        old = self.held
        before, rank = self.placement, self.ranks.rank
        assert before is not None, "experts are whole"
        weights = [each.view(torch.uint8) for each in self.parameters(recurse=False)]
        for move in moves_between(before, placement):
            ends = [divmod(slot, placement.num_local) for slot in (move.source, move.target)]
            own = [slot for owner, slot in ends if owner == rank]
            if len(own) == 2:
                copy_slot(weights, *own, is_swap=move.is_swap)
            elif own:
                is_source = ends[0][0] == rank
                exchange(
                    [each[own[0]] for each in weights],
                    ends[is_source][0],
                    self.ranks.name,
                    sends=is_source or move.is_swap,
                    receives=not is_source or move.is_swap,
                )
        self.placement = placement
        self.expert_map.copy_(torch.tensor(placement.expert_map(rank), dtype=torch.int32))
        for room in self.rooms:
            if room.held is not None:
                room.held = self.held
        return [slot for slot, each in enumerate(self.held) if each != old[slot]]

    def stacked(
        self, param: nn.Parameter, loaded: torch.Tensor, expert: int | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields parts of param, and parts of `loaded` with the same experts.

        expert: the only one of `loaded`; None if it stacks all.
        """
        if self.placement is None and expert is None:
            yield param, loaded
            return
        if expert is not None:
            slot = self.slot_of(expert)
            if slot is not None:
                yield param[slot : slot + 1], loaded
            return
        assert self.placement is not None, "the other case came first"
        check_shape(loaded, (self.placement.num_experts, *loaded.shape[1:]))
        for slot, each in enumerate(self.placement.experts_of(self.ranks.rank)):
            yield param[slot : slot + 1], loaded[each : each + 1]

    def _load(
        self, param: nn.Parameter, target: torch.Tensor, loaded: torch.Tensor, parts: Sequence[int]
    ) -> None:
        rank, num_ranks = self.group.rank, self.group.size
        shape = list(self.stored_shape(param, target))
        if param is self.down_proj_bias:
            check_shape(loaded, tuple(target.shape))
            # Ranks add up their outputs, so only one of them holds the bias.
            target.copy_(loaded if rank == 0 else torch.zeros_like(loaded))
        elif self._has_whole_rows(param):
            check_shape(loaded, tuple(target.shape))
            target.copy_(loaded)
        elif param is self.down_proj or param is self.down_proj_scale:
            share = shape[-1]
            check_shape(loaded, (*shape[:-1], share * num_ranks))
            self.fill(param, target, loaded.narrow(-1, rank * share, share))
        else:
            rows = -1 if param is self.gate_up_proj_bias else -2
            share = shape[rows] // self.num_parts
            shape[rows] = share * num_ranks * len(parts)
            check_shape(loaded, tuple(shape))
            for part, stored in zip(parts, loaded.chunk(len(parts), dim=rows), strict=True):
                self.fill(param, target, stored.narrow(rows, rank * share, share), part)

    def stored_shape(self, param: nn.Parameter, target: torch.Tensor) -> Shape:
        """Returns the shape in which a checkpoint has what is in a part of param."""
        if not self._is_tiled(param):
            return tuple(target.shape)
        weight = self.down_proj if param is self.down_proj_scale else self.gate_up_proj
        return *target.shape[:-3], target.shape[-2], 2 * weight.shape[-1] // self.columns_per_scale

    def fill(
        self,
        param: nn.Parameter,
        target: torch.Tensor,
        values: torch.Tensor,
        part: int | None = None,
    ) -> None:
        """Copies into part of param, in the order of kernels; weights with a packing have it.

        part: 0 for the gate in it, 1 for up.
        """
        if self._is_tiled(param):
            fill_tiled(target, values, part or 0, 1 if part is None else self.num_parts)
            return
        if part is not None:
            rows = -1 if param is self.gate_up_proj_bias else -2
            target = target.chunk(self.num_parts, dim=rows)[part]
        target.copy_(values)
        is_weight = param is self.gate_up_proj or param is self.down_proj
        if is_weight and param.dtype == MXFP4 and self.packing is None:
            # One matrix at a time, whose unpacked copies take little memory.
            for matrix in target if target.dim() == param.dim() else (target,):
                matrix[:] = to_kernel_order(matrix, is_float=True)

    def _is_tiled(self, param: nn.Parameter) -> bool:
        """Returns whether param has scales of 4-bit weights."""
        is_scale = param is self.gate_up_proj_scale or param is self.down_proj_scale
        return is_scale and self.down_proj.dtype == torch.uint8

    def _has_whole_rows(self, param: nn.Parameter) -> bool:
        """Returns whether param scales rows of down, which all ranks share."""
        return param is self.down_proj_scale and param.shape[1:] == (self.down_proj.shape[1], 1)


class TransposedExperts(Experts):
    """Experts whose checkpoint stacks all of a layer, with rows and columns exchanged."""

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share of a tensor of all experts: [E, H, 2 * I] or [E, I, H].

        transformers 5 writes them as the layer has them, [E, 2 * I, H] and [E, H, I].
        """
        if loaded.dim() != len(self.stored_shape(param, param)):
            raise ValueError(f"its shape is {tuple(loaded.shape)}; the model needs 3 dimensions")
        hidden_dim = 1 if param is self.down_proj else 2
        is_own = any(param is each for each in self.parameters(recurse=False))
        if is_own and loaded.shape[3 - hidden_dim] == param.shape[hidden_dim]:
            loaded = loaded.transpose(1, 2)
        super().weight_loader(param, loaded, shard_id)
