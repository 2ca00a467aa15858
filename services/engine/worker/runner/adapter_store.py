"""The adapters of a worker: all in host memory, some in slots of the model's layers."""

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog
import torch

from models.layers.adapter_room import (
    AdaptedLayer,
    LayerAdapter,
    clear_slot,
    fill_experts,
    fill_slot,
)
from models.layers.decoder import CausalLM
from models.layers.expert_room import ExpertRoom
from models.layers.experts import Experts
from models.loading.adapter import Adapter, AdapterError, AdapterReader
from protos.engine.v1.batch_pb2 import AdapterLoad
from protos.engine.v1.worker_pb2 import AdapterRead, ReadAdapter, WorkerCommand

log = structlog.get_logger()


class AdapterStore:
    """Reads adapters while steps run, and loads them into slots between steps.

    All ranks get the same orders in the same order.
    """

    def __init__(self, model: CausalLM, device: torch.device, *, num_ranks: int = 1) -> None:
        """Starts without adapters.

        Args:
            model: with room for adapters.
            device: of the model.
            num_ranks: ranks that share its layers.
        """
        self._model = model
        self._reader = AdapterReader(model, num_ranks=num_ranks, is_pinned=device.type == "cuda")
        self._adapters: dict[bytes, Adapter] = {}
        self._used: dict[int, set[AdaptedLayer]] = {}
        """The layers that the adapter in a slot changes."""
        self._of_moving: dict[int, list[LayerAdapter]] = {}
        """Shares of the adapter in a slot whose experts move between ranks. Requests may use them
        again after the adapter was forgotten, when the same one is read again."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="read-adapter")
        self._reading: dict[int, Future[Adapter]] = {}

    @property
    def is_reading(self) -> bool:
        """Whether an adapter is being read."""
        return bool(self._reading)

    def obey(self, command: WorkerCommand) -> None:
        """Begins to read an adapter, or forgets one."""
        if command.WhichOneof("command") == "read_adapter":
            self.begin_read(command.read_adapter)
        else:
            self.forget(command.forget_adapter.digest)

    def begin_read(self, order: ReadAdapter) -> None:
        """Begins to read an adapter in a thread."""
        self._reading[order.order_id] = self._threads.submit(self._reader.read, Path(order.path))

    def read(self, folder: Path) -> bytes:
        """Reads an adapter and returns its digest.

        Raises:
            ValueError: something is wrong with it.
        """
        adapter = self._reader.read(folder)
        self._adapters.setdefault(adapter.digest, adapter)
        return adapter.digest

    def finished(self) -> Iterable[AdapterRead]:
        """Yields the answers to orders whose adapters have been read or refused."""
        for order_id in [each for each, future in self._reading.items() if future.done()]:
            yield self._finish(order_id)

    def forget(self, digest: bytes) -> None:
        """Frees the host memory of an adapter."""
        self._adapters.pop(digest, None)

    @torch.inference_mode()
    def load(self, loads: Iterable[AdapterLoad]) -> None:
        """Copies adapters into slots, before the step that uses them.

        Raises:
            ValueError: an adapter was not read, or a slot does not exist.
        """
        for each in loads:
            adapter = self._adapters.get(each.digest)
            if adapter is None:
                raise ValueError(f"a step needs the adapter {each.digest.hex()}, which is not here")
            if each.slot >= self._model.num_adapter_slots:
                raise ValueError(f"a step fills the adapter slot {each.slot}, which does not exist")
            used = {share.layer for share in adapter.layers}
            for layer in self._used.pop(each.slot, set()) - used:
                clear_slot(layer, each.slot)
            for share in adapter.layers:
                fill_slot(share, each.slot)
            self._used[each.slot] = used
            self._of_moving[each.slot] = [
                share for share in adapter.layers if _moves_experts(share.layer)
            ]

    def follow(self, experts: Experts, indices: Collection[int]) -> None:
        """Copies the adapters in slots again, of experts that have moved to this rank.

        indices: of these experts in their layer's tensors.
        """
        for slot, shares in self._of_moving.items():
            for share in shares:
                if share.layer in experts.rooms:
                    fill_experts(share, slot, indices)

    def _finish(self, order_id: int) -> AdapterRead:
        future = self._reading.pop(order_id)
        try:
            adapter = future.result()
        except AdapterError as error:
            return AdapterRead(order_id=order_id, error=str(error))
        except Exception as error:
            log.exception("adapter_read_failed", error=str(error))
            return AdapterRead(order_id=order_id, error="it cannot be read; the log says why")
        self._adapters.setdefault(adapter.digest, adapter)
        return AdapterRead(
            order_id=order_id, digest=adapter.digest, rank=adapter.rank, num_bytes=adapter.nbytes
        )


def _moves_experts(layer: AdaptedLayer) -> bool:
    return isinstance(layer, ExpertRoom) and layer.held is not None
