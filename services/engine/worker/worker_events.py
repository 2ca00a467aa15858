"""Events that a worker sends to its service; any thread may send one."""

import contextlib
import threading

from protos.engine.v1.worker_pb2 import (
    CompileReport,
    ProfileReport,
    WorkerEvent,
    WorkerFailure,
    WorkerProgress,
)
from services.engine.compilation.graphs.graph_runner import GraphOutcome
from services.engine.kv_cache.host_tier import DiskNews
from services.engine.worker.start.graph_setup import graph_report
from services.engine.worker.tiers.disk_tier import disk_report
from services.engine.worker.wire import Channel


class WorkerEvents:
    """Sends events over a worker's channel, one at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()

    def send(self, event: WorkerEvent) -> None:
        """Sends an event.

        Raises:
            EOFError: the service hung up.
        """
        with self._sending:
            self._channel.send(event.SerializeToString())

    def report_progress(self, stage: str) -> None:
        """Reports a stage of the start."""
        self.send(WorkerEvent(progress=WorkerProgress(stage=stage)))

    def report_graph(self, outcome: GraphOutcome) -> None:
        """Reports a graph that was captured or given up."""
        self.send(WorkerEvent(graph=graph_report(outcome)))

    def report_compiled(self, report: CompileReport) -> None:
        """Reports a model that was traced or compiled while serving."""
        self.send(WorkerEvent(compiled=report))

    def report_profile(self, report: ProfileReport | None) -> None:
        """Reports a profile that has ended, if one has."""
        if report is not None:
            self.send(WorkerEvent(profile_ended=report))

    def report_disk(self, news: DiskNews) -> None:
        """Reports blocks that were written to disk or read from it."""
        with contextlib.suppress(EOFError):  # the main thread notices, too
            self.send(WorkerEvent(disk=disk_report(news)))

    def report_failure(self, failure: WorkerFailure) -> None:
        """Reports why this worker cannot go on, unless the service is gone."""
        with contextlib.suppress(EOFError):
            self.send(WorkerEvent(failure=failure))
