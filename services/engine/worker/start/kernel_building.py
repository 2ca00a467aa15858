"""Builds the kernels of a worker's steps in other processes, before the steps run.

Dummy steps show the needed kernels and load those in Triton's cache. If one is missing, the steps
run again with all launches skipped, which takes only host time, and each missing kernel is built in
a process.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch.overrides import TorchFunctionMode

from models.kernels.gpu import HAS_TRITON
from services.engine.config.worker import WorkerConfig
from services.engine.worker.graphs.turns import Turns
from services.engine.worker.start.build_processes import (
    BACKGROUND_NICENESS,
    BuildProcesses,
    num_processes,
)

if TYPE_CHECKING:
    from models.kernels.launching.kernel_builds import KernelBuild

log = structlog.get_logger()

WarmUp = Callable[[], None]
"""Runs dummy steps."""

_ZEROED: dict[Any, Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class KernelBuilding:
    """Builds kernels in other processes: `fork`, `build_first`, `build_others`, in this order.

    `build_while_serving` fits in before the last.
    """

    def __init__(self, processes: BuildProcesses | None) -> None:
        """Starts to load what every launch needs, in parallel to the caller.

        Args:
            processes: the builders; None on a machine without kernels or with one processor.
        """
        self._processes = processes
        self._loaded: Future[None] | None = None
        self._ordered: list[int] = []
        if HAS_TRITON and processes is not None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernels")
            self._loaded = thread.submit(_prepare_launches)
            thread.shutdown(wait=False)

    @classmethod
    def fork(cls, config: WorkerConfig) -> "KernelBuilding":
        """Forks the builders, while this process has no other threads."""
        may_have_kernels = HAS_TRITON and torch.version.cuda and config.device != "cpu"
        if not may_have_kernels or len(os.sched_getaffinity(0)) == 1:
            return cls(None)
        return cls(BuildProcesses.fork(_load_kernel_functions))

    def build_first(
        self, first: WarmUp, *, early: WarmUp, next_: WarmUp, soon: WarmUp, others: WarmUp
    ) -> None:
        """Builds and loads all kernels of the first steps.

        Args:
            first: steps of the first request.
            early: steps of several first requests. These and `first` show whether Triton's cache
                has the kernels.
            next_: other steps before the worker is ready. If a kernel is missing, these and the
                next two run here without launches.
            soon: steps whose kernels are built at the same time, without waiting for them.
            others: steps whose kernels are built after that.
        """
        if self._processes is None:
            first()
            early()
            return
        assert self._loaded is not None, "it is begun where there are processes"
        self._loaded.result()
        if not _has_all_kept((first, early)):
            self._build(self._processes, [[first, next_], [early]], [[soon], [others]])
            first()
            early()

    def build_while_serving(self, warm_ups: Sequence[WarmUp], turns: Turns) -> None:
        """Builds the kernels of further steps; other threads may launch kernels meanwhile.

        turns: lets graphs be captured during the wait for them.
        """
        if self._processes is None:
            return
        started_s = time.monotonic()
        missing = _missing_of(found_in(warm_ups, while_serving=True))
        if missing:
            builds = list(missing.values())
            ordered = self._processes.begin(builds, niceness=BACKGROUND_NICENESS)
            with turns.pause():
                self._wait(self._processes, "kernels_built", ordered, started_s)

    def build_others(self) -> None:
        """Waits for the remaining builds and ends the processes."""
        if self._processes is None:
            return
        if self._ordered:
            self._wait(self._processes, "later_kernels_built", self._ordered, time.monotonic())
        self._processes.stop()
        self._processes = None

    def _build(
        self,
        processes: BuildProcesses,
        urgent: Sequence[Sequence[WarmUp]],
        later: Sequence[Sequence[WarmUp]],
    ) -> None:
        """Builds the kernels of groups of steps, and orders those of later groups.

        While the first kernels are built, the next groups show theirs.
        """
        started_s = time.monotonic()
        names: set[str] = set()

        def order(warm_ups: Sequence[WarmUp], niceness: int) -> list[int]:
            missing = _missing_of(found_in(warm_ups))
            builds = [build for name, build in missing.items() if name not in names]
            names.update(missing)
            return list(processes.begin(builds, niceness=niceness)) if builds else []

        awaited = [number for group in urgent for number in order(group, 0)]
        collect_s = round(time.monotonic() - started_s, 3)
        soon, *others = later
        self._ordered = order(soon, 0)
        self._ordered += [each for group in others for each in order(group, BACKGROUND_NICENESS)]
        self._wait(processes, "kernels_built", awaited, started_s, collect_s=collect_s)

    def _wait(
        self,
        processes: BuildProcesses,
        event: str,
        numbers: Sequence[int],
        started_s: float,
        **facts: float,
    ) -> None:
        if not numbers:
            return
        report = processes.wait(numbers)
        log.info(
            event,
            num_kernels=report.num_built,
            processes=num_processes(len(numbers)),
            build_s=round(time.monotonic() - started_s, 3),
            **facts,
        )
        if report.num_failed:
            log.warning("kernels_left_to_build", num_kernels=report.num_failed, error=report.error)


def found_in(
    warm_ups: Collection[WarmUp], *, while_serving: bool = False
) -> "dict[str, KernelBuild]":
    """Returns the kernels that steps launch, by name, without launching them.

    Args:
        warm_ups: the steps.
        while_serving: other threads may launch kernels meanwhile.
    """
    from models.kernels.launching.kernel_builds import launches_skipped

    with launches_skipped(while_serving=while_serving) as builds, _ZeroedTensors():
        for warm_up in warm_ups:
            warm_up()
    return builds


def _missing_of(builds: "dict[str, KernelBuild]") -> "dict[str, KernelBuild]":
    """Returns the kernels missing in the cache, slow builds first."""
    missing = [(name, build) for name, build in builds.items() if not build.is_kept]
    return dict(sorted(missing, key=lambda each: each[1].num_characters, reverse=True))


class _ZeroedTensors(TorchFunctionMode):
    """Zeroes new tensors, because skipped kernels do not write them.

    Steps look up tokens, slots and positions in them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replaces torch functions that make tensors without values."""
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))


def _has_all_kept(warm_ups: Collection[WarmUp]) -> bool:
    """Runs steps up to the first kernel missing in Triton's cache; returns whether none is."""
    # Triton is imported on first use: a CPU installation has none.
    from models.kernels.launching.kernel_builds import MissingKernelError, only_kept_kernels

    try:
        with only_kept_kernels():
            for warm_up in warm_ups:
                warm_up()
    except MissingKernelError as missing:
        log.info("kernel_missing", name=str(missing))
        return False
    return True


def _load_kernel_functions() -> None:
    from models.kernels.launching.kernel_builds import load_kernel_functions

    load_kernel_functions()


def _prepare_launches() -> None:
    from models.kernels.launching.kernel_builds import prepare_launches

    prepare_launches()
