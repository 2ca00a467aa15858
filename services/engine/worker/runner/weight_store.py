"""Other weights for a running model: checked beside its steps, loaded between two of them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError
from models.loading.digest import tensors_digest
from models.loading.plan import Load
from models.loading.reload import check_loads, plan_reload, reload_bytes, reload_weights
from models.parallel.group import ParallelGroup
from protos.engine.v1.worker_pb2 import OrderAnswer, WorkerCommand

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Source:
    folder: Path
    is_part: bool
    digest: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Checked:
    source: _Source
    loads: Sequence[Load]


class WeightStore:
    """Checks weights while steps run, and loads the ones checked last into the model.

    All ranks get the same orders in the same order.
    """

    def __init__(
        self, model: CausalLM, group: ParallelGroup, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Starts without other weights.

        Args:
            model: on `device`.
            group: the ranks that share it.
            device: of the model.
            dtype: of its activations.
        """
        self._model = model
        self._device = device
        self._dtype = dtype
        self._is_shared = group.of_experts.size > 1
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="check-weights")
        self._checking: dict[int, Future[_Checked]] = {}
        self._checked: _Checked | None = None
        self._wanted = 0
        """The check whose weights may be loaded."""
        self._loaded: list[_Source] = []
        """Weights that were loaded over the first ones, or over each other."""
        self.on_swap: Callable[[], None] = lambda: None
        """Called once other weights are loaded between two steps."""

    @property
    def is_checking(self) -> bool:
        """Whether weights are being checked."""
        return bool(self._checking)

    def obey(self, command: WorkerCommand) -> Iterable[OrderAnswer]:
        """Begins to check weights, loads those checked last, or forgets them.

        No step may be in flight while weights are loaded.

        Returns:
            The answer, if there is one now; `finished` gives those to checks.

        Raises:
            CheckpointError: the weights changed after the check; the model's are a mixture now.
        """
        checked, self._checked = self._checked, None
        kind = command.WhichOneof("command")
        if kind == "check_weights":
            order = command.check_weights
            future = self._threads.submit(self._check, Path(order.path), is_part=order.is_part)
            self._checking[command.order_id] = future
            self._wanted = command.order_id
            return []
        self._wanted = 0
        if kind == "swap_weights":
            if checked is None:
                raise CheckpointError("weights are checked before they are loaded")
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._load(checked)
            self.on_swap()
        return [OrderAnswer(order_id=command.order_id)]

    def finished(self) -> Iterable[OrderAnswer]:
        """Yields the answers to checks that have ended."""
        for order_id in [each for each, future in self._checking.items() if future.done()]:
            yield self._finish(order_id)

    def load_at_start(self, folders: Iterable[Path], on_progress: Callable[[str], None]) -> None:
        """Loads weights before the first step, one folder's over the other's.

        Raises:
            CheckpointError: they do not fit the model.
        """
        for folder in folders:
            on_progress(f"loading weights of {folder.name}")
            self._load(self._check(folder, is_part=True))

    @property
    def replaces_all(self) -> bool:
        """Whether nothing is left of the weights that the model began with."""
        return bool(self._loaded) and not self._loaded[0].is_part

    def plan_again(self) -> list[list[Load]]:
        """Returns the loads of the weights that came after the first ones, in order.

        Raises:
            CheckpointError: a folder's tensors have changed since they were loaded, or are gone.
        """
        for each in self._loaded:
            if tensors_digest(each.folder) != each.digest:
                raise CheckpointError(f"{each.folder} has changed since it was loaded")
        return [list(self._plan(each.folder, is_part=each.is_part)) for each in self._loaded]

    def _load(self, checked: _Checked) -> None:
        reload_weights(
            checked.loads, device=self._device, dtype=self._dtype, is_shared=self._is_shared
        )
        source = checked.source
        left = [each for each in self._loaded if source.is_part and not each.names <= source.names]
        self._loaded = [*left, source]

    def _plan(self, folder: Path, *, is_part: bool) -> Sequence[Load]:
        return plan_reload(
            self._model, folder, device=self._device, dtype=self._dtype, is_part=is_part
        )

    def _check(self, folder: Path, *, is_part: bool) -> _Checked:
        """Reads and checks weights.

        Raises:
            CheckpointError: they do not fit the model, or the device lacks the memory to load them.
        """
        if self._model.pooling is not None and any(True for _ in self._model.pooling.parameters()):
            raise CheckpointError("the model has a head that pools, which no update changes")
        loads = self._plan(folder, is_part=is_part)
        self._check_room(loads)
        check_loads(loads)
        names = frozenset(load.tensor.name for load in loads)
        return _Checked(_Source(folder, is_part, tensors_digest(folder), names), loads)

    def _check_room(self, loads: Sequence[Load]) -> None:
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        needed = reload_bytes(loads)
        if needed > free + cached:
            raise CheckpointError(
                f"loading takes {needed / 2**20:.0f} MiB of the GPU for a while, which has "
                f"{(free + cached) / 2**20:.0f} MiB free; lower --gpu-memory-utilization"
            )

    def _finish(self, order_id: int) -> OrderAnswer:
        future = self._checking.pop(order_id)
        try:
            checked = future.result()
        except CheckpointError as error:
            return OrderAnswer(order_id=order_id, error=str(error))
        except Exception as error:
            log.exception("weights_check_failed", error=str(error))
            return OrderAnswer(order_id=order_id, error="they cannot be read; the log says why")
        if order_id == self._wanted:
            self._checked = checked
        return OrderAnswer(order_id=order_id, digest=checked.source.digest)
