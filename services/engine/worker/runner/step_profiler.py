"""Profiles steps with torch's profiler, bounded in time, steps and memory."""

import contextlib
import gzip
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from torch.autograd.profiler import profile, record_function

from protos.engine.v1.worker_pb2 import ProfileEnd, ProfileReport, ProfileStart
from services.engine.batch import BatchDescriptor, GraphKind

log = structlog.get_logger()

WRITE_POLL_S = 10e-3
"""Pause between checks of a trace that is being written, while the worker is idle."""

GROWTH_AT_END = 7
"""Memory of a finished trace over that of the events as they come: 717 over 105 MB for 100,000
operations (torch 2.13, 2026-11)."""

COMPRESSION_LEVEL = 1
"""Of gzip: half the time of the default level for files a quarter larger."""


@dataclass(slots=True, kw_only=True)
class _Running:
    """A running profile and its limits."""

    order: ProfileStart
    profiler: profile
    started_s: float
    first_bytes: int
    num_steps: int = 0

    @property
    def end(self) -> ProfileEnd | None:
        """The limit that was reached, if any."""
        order = self.order
        if order.max_steps and self.num_steps >= order.max_steps:
            return ProfileEnd.PROFILE_END_STEPS
        if self.remaining_s <= 0:
            return ProfileEnd.PROFILE_END_TIME
        if (_resident_bytes() - self.first_bytes) * GROWTH_AT_END > order.max_bytes:
            return ProfileEnd.PROFILE_END_MEMORY
        return None

    @property
    def remaining_s(self) -> float:
        """Seconds until its time is over; negative afterwards."""
        return self.started_s + self.order.max_s - time.monotonic()


class StepProfiler:
    """Profiles the thread that runs steps, and the GPU.

    Events stay in memory until the end. Steps wait while torch sorts and writes them; a thread
    compresses the file. No method raises an error of a profile: its report has it.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._writing: Future[ProfileReport] | None = None

    @property
    def max_wait_s(self) -> float | None:
        """Longest time that an idle worker may wait until it calls `poll`; None for no limit."""
        if self._writing is not None:
            return WRITE_POLL_S
        return None if self._running is None else max(0.0, self._running.remaining_s)

    def start(self, order: ProfileStart) -> ProfileReport | None:
        """Starts a profile; returns a report if it cannot."""
        if self._running is not None or self._writing is not None:
            return ProfileReport(error="a profile is running; stop it first")
        try:
            _part_of(order).touch()
        except OSError as error:
            return ProfileReport(error=f"the trace cannot be written: {error.strerror}")
        # torch.profiler would import Inductor first, in the middle of serving: 2 s.
        profiler = profile(use_kineto=True, use_device="cuda" if _uses_cuda() else None)
        profiler.__enter__()  # type: ignore[no-untyped-call]  # torch's
        self._running = _Running(
            order=order,
            profiler=profiler,
            started_s=time.monotonic(),
            first_bytes=_resident_bytes(),
        )
        return None

    def step(self, descriptor: BatchDescriptor) -> contextlib.AbstractContextManager[object]:
        """Counts a step and names it in the trace; a running profile does."""
        if self._running is None:
            return contextlib.nullcontext()
        self._running.num_steps += 1
        return record_function(_name_of(descriptor))

    def stop(self) -> None:
        """Ends a running profile; `poll` returns its report."""
        if self._running is not None:
            self._end(self._running, ProfileEnd.PROFILE_END_STOPPED)

    def poll(self) -> ProfileReport | None:
        """Ends a profile that reached a limit; returns a report once its trace is written."""
        if self._running is not None:
            end = self._running.end
            if end is not None:
                self._end(self._running, end)
        if self._writing is None or not self._writing.done():
            return None
        report, self._writing = self._writing.result(), None
        return report

    def _end(self, running: _Running, end: ProfileEnd) -> None:
        duration_s = time.monotonic() - running.started_s
        self._running = None
        running.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trace")
        self._writing = thread.submit(_write, running, end, duration_s)
        thread.shutdown(wait=False)


def _write(running: _Running, end: ProfileEnd, duration_s: float) -> ProfileReport:
    """Writes the trace; it appears whole under its name."""
    order = running.order
    path, part = Path(order.path), _part_of(order)
    plain = part.with_suffix(".json")
    try:
        running.profiler.export_chrome_trace(str(plain))  # type: ignore[no-untyped-call]  # torch's
        with plain.open("rb") as source, gzip.open(part, "wb", COMPRESSION_LEVEL) as target:
            shutil.copyfileobj(source, target, 2**20)
        part.replace(path)
        num_bytes = path.stat().st_size
    except (OSError, RuntimeError) as error:
        log.warning("trace_not_written", path=order.path, exc_info=error)
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        return ProfileReport(error=f"the trace cannot be written: {reason}")
    finally:
        plain.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    return ProfileReport(
        num_bytes=num_bytes, num_steps=running.num_steps, duration_s=duration_s, end=end
    )


def _part_of(order: ProfileStart) -> Path:
    return Path(order.path + ".part")


def _name_of(descriptor: BatchDescriptor) -> str:
    context = descriptor.context
    graph = "eager"
    if descriptor.HasField("graph_key"):
        kind = GraphKind.Name(descriptor.graph_key.kind).removeprefix("GRAPH_KIND_").lower()
        graph = f"{kind} graph of {descriptor.graph_key.num_tokens}"
    return (
        f"step {descriptor.step_id}: {context.num_tokens} tokens of {context.batch_size}, {graph}"
    )


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
