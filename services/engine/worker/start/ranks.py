"""Joins this process with the other ranks, and what they must agree on."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from models.parallel.collectives import (
    LostPeerError,
    begin_send,
    finish,
    gather_into,
    receive_into,
    reduce_scatter_into,
    sum_in_place,
    use_process_group,
)
from models.parallel.group import (
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    SINGLE,
    TENSOR_PARALLEL,
    ParallelGroup,
    PipelineStage,
)
from models.parallel.intermediate_tensors import STAGE_AFTER, STAGE_BEFORE
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.meeting import Meeting
from services.engine.worker.placement import RankPlace, rank_places

_Value = TypeVar("_Value")

MEETING_LIMIT_S = 120.0
"""Longest wait for the other ranks to begin, once this one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank among all, and agreements of their hosts.

    place: this rank's. group: the ranks that hold a share of every layer. host_group: of torch, for
    agreements; absent for a single rank.
    """

    place: RankPlace
    group: ParallelGroup = SINGLE
    host_group: dist.ProcessGroup | None = None

    @classmethod
    def single(cls, config: EngineConfig) -> "Ranks":
        """Returns the only rank of a process that holds a whole model."""
        return cls(place=rank_places(config.parallel)[0])

    @classmethod
    def join(
        cls, config: EngineConfig, place: RankPlace, device: torch.device, meeting: Meeting
    ) -> "Ranks":
        """Meets the other ranks and connects with them.

        Args:
            config: the engine's.
            place: this rank's.
            device: this rank's.
            meeting: where it finds the others.

        Raises:
            ValueError: a rank did not come in time; the message names it.
        """
        size = config.parallel.num_ranks
        limit_s = config.worker.worker_start_timeout_s
        meeting_limit_s = min(limit_s / 2, MEETING_LIMIT_S)
        store = _open_store(meeting, place.rank, size, meeting_limit_s)
        _meet(store, place.rank, size, meeting_limit_s)
        limit = timedelta(seconds=limit_s)
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=place.rank,
            world_size=size,
            timeout=limit,
            device_id=device if is_cuda else None,
        )
        hosts = dist.new_group(backend="gloo", timeout=limit)
        _form_groups(config, place, limit)
        stage = PipelineStage(
            rank=place.pipeline_parallel_rank,
            size=config.parallel.pipeline_parallel_size,
            num_layers=tuple(config.parallel.pipeline_layers or ()),
        )
        group = ParallelGroup(
            rank=place.tensor_parallel_rank,
            size=config.parallel.tensor_parallel_size,
            stage=stage,
            enable_expert_parallel=config.parallel.enable_expert_parallel,
            num_redundant_experts=config.parallel.num_redundant_experts,
            data_parallel_rank=place.data_parallel_rank,
            data_parallel_size=config.parallel.data_parallel_size,
        )
        _say_hello(group, device)
        return cls(place=place, group=group, host_group=hosts)

    @property
    def has_others(self) -> bool:
        """Whether there is more than one rank."""
        return self.host_group is not None

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values."""
        return min(self._gather(value))

    def common_fault(self, fault: str) -> str:
        """Returns a fault that holds for all ranks: this one's, or else that of another one."""
        faults = self._gather_text(fault)
        return next(
            (each if rank == self.place.rank else f"rank {rank}: {each}"
             for rank, each in enumerate(faults) if each),
            "",
        )  # fmt: skip

    def require_same(self, facts: Mapping[str, str]) -> None:
        """Checks that all ranks know the same facts.

        Raises:
            ValueError: one knows another; the message names it and the fact.
        """
        first, *others = self._gather(dict(facts))
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other.get(name) != value:
                    raise ValueError(
                        f"rank {rank} has another {name} than rank 0: {other.get(name)}, not "
                        f"{value}"
                    )

    def _gather(self, value: _Value) -> list[_Value]:
        """Returns every rank's value, in order.

        Values travel as JSON: what another host sends must not be unpickled.
        """
        return [json.loads(each) for each in self._gather_text(json.dumps(value))]

    def _gather_text(self, text: str) -> list[str]:
        """Returns every rank's text, in order."""
        if self.host_group is None:
            return [text]
        try:
            return [each.decode() for each in _gather_bytes(self.host_group, text.encode())]
        except RuntimeError as error:
            raise LostPeerError(str(error)) from error


def _gather_bytes(group: dist.ProcessGroup, content: bytes) -> list[bytes]:
    """Returns every rank's bytes, in order; if all have none, in one exchange and not in two."""
    own_length = torch.tensor([len(content)])
    lengths = [torch.empty_like(own_length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, own_length, group=group)
    longest = max(int(each) for each in lengths)
    if not longest:
        return [content] * len(lengths)
    padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [
        part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
    ]


def _open_store(meeting: Meeting, rank: int, size: int, limit_s: float) -> Store:
    """Opens the store in which ranks find each other.

    Raises:
        ValueError: rank 0, which has it, cannot be reached.
    """
    if meeting.fd is not None:
        os.set_inheritable(meeting.fd, False)
    if not meeting.address:
        return FileStore(f"/proc/self/fd/{meeting.fd}", size)
    host, _, port = meeting.address.rpartition(":")
    try:
        return TCPStore(
            host,
            int(port),
            is_master=rank == 0,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            master_listen_fd=meeting.fd,
        )
    except RuntimeError as error:
        raise ValueError(f"rank {rank} cannot reach rank 0 at {meeting.address}") from error


def _form_groups(config: EngineConfig, place: RankPlace, limit: timedelta) -> None:
    """Makes the groups that a layer names, and those of each two ranks of neighbouring stages.

    Every rank makes all groups, in the same order, and is in some of them.
    """
    parallel = config.parallel
    size, ranks = parallel.tensor_parallel_size, range(parallel.num_ranks)
    assert dist.group.WORLD is not None, "the caller has made it"
    use_process_group(EXPERT_PARALLEL, dist.group.WORLD)
    groups = {}
    if size > 1:
        groups[TENSOR_PARALLEL] = [ranks[first : first + size] for first in ranks[::size]]
    if parallel.data_parallel_size > 1:
        groups[DATA_PARALLEL] = [ranks[first::size] for first in range(size)]
    for name, divisions in groups.items():
        for members in divisions:
            is_all = len(members) == len(ranks)
            group = dist.group.WORLD if is_all else dist.new_group(list(members), timeout=limit)
            if place.rank in members:
                use_process_group(name, group)
    if parallel.pipeline_parallel_size == 1:
        return
    for sender, receiver in zip(ranks, ranks[size:], strict=False):
        group = dist.new_group([sender, receiver], timeout=limit)
        if place.rank == sender:
            use_process_group(STAGE_AFTER, group)
        elif place.rank == receiver:
            use_process_group(STAGE_BEFORE, group)


def _say_hello(group: ParallelGroup, device: torch.device) -> None:
    """Uses each connection once: the first message allocates; neither a step nor a capture may."""
    one = torch.zeros(1, device=device)
    if group.size > 1:
        sum_in_place(one, group.name)
    if group.data_parallel_size > 1:
        all_ones = one.new_empty(group.data_parallel_size, 1)
        gather_into(all_ones, one, DATA_PARALLEL)
        reduce_scatter_into(one, all_ones.view(-1), DATA_PARALLEL)
    if not group.stage.is_first:
        receive_into(one, STAGE_BEFORE)
    if not group.stage.is_last:
        work = begin_send(one, STAGE_AFTER)
        assert work is not None, "the other ranks take part"
        finish(work)


def _meet(store: Store, rank: int, size: int, limit_s: float) -> None:
    """Waits for all ranks to arrive.

    Raises:
        ValueError: some did not; the message names them.
    """
    keys = [f"arrived/{each}" for each in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=limit_s))
    except RuntimeError as error:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(f"rank {number}" for number in missing)
        raise ValueError(f"{names} did not begin within {limit_s:g} s of rank {rank}") from error
