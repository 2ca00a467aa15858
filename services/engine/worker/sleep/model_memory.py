"""The weights and the KV cache of one rank, in memory that it can give back."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn

from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError
from models.loading.digest import checkpoint_digest
from models.loading.plan import Load
from models.loading.reload import plan_reload, reload_weights
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.out_of_memory import is_out_of_memory, release_memory
from services.engine.worker.sleep.device_pages import DevicePages
from services.engine.worker.sleep.host_copy import HostCopy
from services.engine.worker.sleep.releasable_memory import HostPages, ReleasableMemory

log = structlog.get_logger()

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels of sleep: weights go to the host's memory, or are loaded again from the checkpoint."""
MOVED_BYTES = 2**30
"""Bytes of weights that may be in both memories while they are moved."""


class NewerWeights(Protocol):
    """The weights that came after the model's first ones; WeightStore."""

    @property
    def replaces_all(self) -> bool:
        """Whether nothing is left of the first ones."""

    def plan_again(self) -> list[list[Load]]:
        """Returns their loads, in order; raises CheckpointError if they have changed."""


@dataclass(slots=True)
class _Region:
    """The memory of one storage, [bytes] uint8, and the weights in it."""

    memory: Tensor
    tensors: list[Tensor]


@dataclass(slots=True)
class _Asleep:
    """The sources of the content after waking.

    copy: of the kept regions. loads: of the other ones, with whether other ranks share the model.
    """

    copy: HostCopy
    loads: list[tuple[list[Load], bool]]


class ModelMemory:
    """Gives back and takes again the memory of a rank's weights and KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        weights: NewerWeights,
        *,
        device: torch.device,
        dtype: torch.dtype,
        is_shared: bool,
        available_host_bytes: Callable[[], int],
    ) -> None:
        """Moves the model's weights and buffers into memory that can be given back.

        Args:
            config: the engine's; says where the model and its draft model came from.
            model: loaded, with its room for adapters and its draft models; nothing has run it.
            weights: has loaded others over the model's first ones, or will.
            device: of the model.
            dtype: of its activations.
            is_shared: whether other ranks share its layers.
            available_host_bytes: returns the memory that the host can still give.

        Raises:
            ValueError: the GPU has no virtual memory management.
        """
        self._model = model
        self._newer = weights
        self._checkpoint = config.checkpoint
        self._draft = config.speculation.draft_model
        self._device = device
        self._dtype = dtype
        self._is_shared = is_shared
        self._available_host_bytes = available_host_bytes
        self._keeps_copy = config.worker.start_asleep
        """Whether the host's memory stays for the next sleep: it takes longer to pin than to fill,
        and an engine that starts asleep shares its device by turns."""
        self._kept_copy: HostCopy | None = None
        folders = [config.checkpoint.model, *self._draft_folders()]
        self._digests = {folder: self._digest_of(folder) for folder in folders}
        self._weights = _make_memory(device, is_zeroed=False)
        self.cache: ReleasableMemory = _make_memory(device, is_zeroed=True)
        """Memory for the KV cache, which is allocated after the weights."""
        modules = [module for each in (model, *model.draft_models) for module in each.modules()]
        self._regions = _move(modules, self._weights, device)
        self._asleep: _Asleep | None = None

    @classmethod
    def of(
        cls, config: EngineConfig, model: CausalLM, weights: NewerWeights, **facts: Any
    ) -> "ModelMemory | None":
        """Moves a model of which the operator wants that; arguments are those of `__init__`."""
        return cls(config, model, weights, **facts) if config.worker.enable_sleep else None

    @property
    def is_asleep(self) -> bool:
        """Whether the memory is given back."""
        return self._asleep is not None

    @property
    def num_bytes(self) -> int:
        """Bytes that are given back and taken again."""
        return self._weights.num_bytes + self.cache.num_bytes

    def sleep(self, level: int) -> None:
        """Gives all memory back; does nothing if it is.

        Args:
            level: KEEP_WEIGHTS or DROP_WEIGHTS. With the latter the host's memory only gets
                buffers, and weights that no checkpoint has.

        Raises:
            CheckpointError: the weights could not be loaded again; nothing has changed.
            MemoryError: the host has no memory for the weights; nothing has changed.
        """
        if self._asleep is not None:
            return
        loads = self._plan() if level == DROP_WEIGHTS else []
        dropped = {id(load.destination.param) for plan, _ in loads for load in plan}
        kept = [
            region.memory
            for region in self._regions
            if any(id(each) not in dropped for each in region.tensors)
        ]
        self._asleep = _Asleep(self._copy(kept), loads)
        self._weights.release()
        self.cache.release()
        release_memory()

    @torch.no_grad()
    def wake(self) -> None:
        """Takes the memory again and fills it; does nothing if it is awake.

        Raises:
            MemoryError: there is too little; all of it stays given back.
        """
        asleep = self._asleep
        if asleep is None:
            return
        try:
            self._weights.restore()
        except MemoryError:
            raise MemoryError(self._shortage()) from None
        try:
            asleep.copy.write_back()
            for loads, is_shared in asleep.loads:
                reload_weights(loads, device=self._device, dtype=self._dtype, is_shared=is_shared)
            self.cache.restore()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            text = self._shortage()
            self._weights.release()  # the cache was not restored
            raise MemoryError(text) from None
        if self._keeps_copy:
            self._kept_copy = asleep.copy
        else:
            asleep.copy.free()
        self._asleep = None

    def _copy(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Returns a copy of tensors, in the memory of the last one if that was kept and fits."""
        kept, self._kept_copy = self._kept_copy, None
        if kept is not None and kept.is_of(tensors):
            kept.refresh()
            return kept
        if kept is not None:
            kept.free()
        num_available = self._available_host_bytes()
        return HostCopy(tensors, self._device, num_available_bytes=num_available)

    def _plan(self) -> list[tuple[list[Load], bool]]:
        """Returns the loads of all weights that a checkpoint has."""
        checkpoint, draft = self._checkpoint, self._draft
        if checkpoint.load_format != "safetensors":
            return []
        first = [] if self._newer.replaces_all else [checkpoint.model]
        for folder in (*first, *self._draft_folders()):
            if self._digest_of(folder) != self._digests[folder]:
                raise CheckpointError(f"{folder} has changed since it was loaded")
        plan = partial(plan_reload, device=self._device, dtype=self._dtype)
        plans = [(plan(self._model, folder), self._is_shared) for folder in first]
        plans += [(loads, self._is_shared) for loads in self._newer.plan_again()]
        for each in self._model.draft_models:
            # A head has no embedding of its own, and is small.
            if isinstance(each, CausalLM) and draft is not None:
                plans.append((plan(each, draft), False))
        return plans

    def _draft_folders(self) -> list[Path]:
        return [] if self._draft is None else [self._draft]

    def _digest_of(self, folder: Path) -> str:
        return checkpoint_digest(folder, self._checkpoint.load_format)

    def _shortage(self) -> str:
        text = f"the weights and the KV cache take {self.num_bytes / 2**30:.2f} GiB"
        if self._device.type != "cuda":
            return text
        free, _ = torch.cuda.mem_get_info(self._device)
        return f"{text} of {self._device}, which has {free / 2**30:.2f} GiB free"


def _make_memory(device: torch.device, *, is_zeroed: bool) -> ReleasableMemory:
    if device.type == "cuda":
        return DevicePages(device, is_zeroed=is_zeroed)
    return HostPages()


@torch.no_grad()
def _move(
    modules: Iterable[nn.Module], memory: ReleasableMemory, device: torch.device
) -> list[_Region]:
    """Moves the tensors of modules, one storage at a time; shared ones stay shared.

    The tensors stay the same objects, so whatever holds one sees its new memory.
    """
    storages: dict[int, dict[int, Tensor]] = {}
    for module in modules:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in own:
            if tensor.numel() and tensor.device.type == device.type:
                storage = tensor.untyped_storage().data_ptr()
                storages.setdefault(storage, {})[id(tensor)] = tensor
    regions, num_moved = [], 0
    for tensors in storages.values():
        regions.append(_move_storage(list(tensors.values()), memory))
        num_moved += regions[-1].memory.nbytes
        if num_moved > MOVED_BYTES:
            release_memory()
            num_moved = 0
    log.info("weights_moved", num_storages=len(regions), num_bytes=memory.num_bytes)
    return regions


def _move_storage(tensors: Sequence[Tensor], memory: ReleasableMemory) -> _Region:
    """Moves tensors that share one storage."""
    old = tensors[0].untyped_storage()
    new = memory.take(old.nbytes())
    new.copy_(torch.empty(0, dtype=torch.uint8, device=new.device).set_(old))
    for tensor in tensors:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor.data = empty.set_(
            new.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return _Region(new, list(tensors))
