"""Figures in Prometheus' form: made in the event loop, served from threads beside it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from services.processes.standard_error import num_dropped_lines
from services.telemetry.histogram import Histogram
from services.telemetry.loop_lag import LoopLag
from services.telemetry.metrics_page import MetricsPage
from services.telemetry.metrics_server import MetricsServer
from services.telemetry.shared_figures import PUBLISH_INTERVAL_S, SharedFigures
from services.transport.hosts import AllowedHosts
from services.transport.refused_calls import RefusedCalls
from services.transport.tls import ServerTls

COLLECT_TIMEOUT_S = 5.0
"""A service that is held up for longer shows no figures."""

log = structlog.get_logger()

Source = Callable[[], Iterable[Metric]]
"""Returns the current figures; called in the event loop."""


class Metrics:
    """A service's figures, for callers in other threads."""

    def __init__(self, source: Source, of_process: "FiguresOfProcess | None" = None) -> None:
        """Reads `source` in the running event loop, where the figures change.

        With `of_process`, the figures are those of several processes.
        """
        own = CollectorRegistry()
        own.register(_LoopCollector(source, asyncio.get_running_loop()))
        own.register(_LogCollector())
        ProcessCollector(registry=own)
        self._own = own
        self._of_process = of_process
        self.registry = own
        """The figures that are shown."""
        if of_process is not None:
            self.registry = CollectorRegistry()
            self.registry.register(_JointCollector(own, of_process))
        self.page = MetricsPage(self.registry)
        """The figures as a page; for the event loop that this was made in."""
        self._server: MetricsServer | None = None
        self._is_publishing = False

    def serve(
        self,
        host: str,
        port: int,
        tls: ServerTls | None,
        hosts: AllowedHosts | None = None,
        refused: RefusedCalls | None = None,
    ) -> int:
        """Opens a port that answers every GET with the figures, and returns it; 0 takes a free one.

        Args:
            host: the address to listen on.
            port: the port.
            tls: what to serve with; None serves in plain text.
            hosts: whose requests are answered; None: those of the address.
            refused: counts requests to other hosts.

        Raises:
            OSError: the address cannot be listened on.
        """
        self._server = MetricsServer(host.strip("[]"), port, self.registry, tls, hosts, refused)
        port = self._server.port
        log.info("metrics_listening", address=f"{host}:{port}", port=port, tls=tls is not None)
        return port

    async def publish(self) -> NoReturn:
        """Shows the figures to other processes, again and again, until cancelled."""
        self._is_publishing = True
        while True:
            if self._of_process is not None:
                await asyncio.to_thread(self._of_process.publish, self._own)
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    def close(self) -> None:
        """Closes the port, if one is open; not to be called in the event loop.

        A process that publishes shows its last figures to the others.
        """
        if self._of_process is not None and self._is_publishing:
            self._of_process.publish(self._own)
        if self._server is not None:
            self._server.close()


@dataclass(frozen=True, slots=True)
class FiguresOfProcess:
    """The place of one process among the figures of several."""

    figures: SharedFigures
    process: int

    def publish(self, own: CollectorRegistry) -> None:
        """Shows the process's own figures to the others."""
        self.figures.publish(self.process, own.collect())


class _JointCollector(Collector):
    """Collects the figures of several processes as one."""

    def __init__(self, own: CollectorRegistry, of_process: FiguresOfProcess) -> None:
        self._own = own
        self._of_process = of_process

    def describe(self) -> Iterable[Metric]:
        """Says nothing: the figures are not asked for at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Returns this process's figures of this moment with the last ones of the others."""
        self._of_process.publish(self._own)
        return self._of_process.figures.joint()


class _LoopCollector(Collector):
    """Collects in the event loop, so that no figure changes while it is read."""

    def __init__(self, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Says nothing: the figures are not asked for at registration, which is in the loop."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Returns the figures of this moment.

        Raises:
            TimeoutError: the event loop does not get round to it.
        """
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(
            COLLECT_TIMEOUT_S
        )

    async def _collect(self) -> list[Metric]:
        return list(self._source())


class _LogCollector(Collector):
    """Counts the log lines that this process lost."""

    def collect(self) -> Iterable[Metric]:
        """Returns their number."""
        meaning = "Log lines that standard error did not take."
        yield CounterMetricFamily("octavo_log_lines_dropped", meaning, value=num_dropped_lines())


class Families:
    """Makes metric families that share a prefix and labels."""

    def __init__(self, prefix: str, **labels: str) -> None:
        """Names every family `<prefix>_<name>` and labels every sample."""
        self._prefix = prefix
        self._labels = labels

    def gauge(self, name: str, value: float, meaning: str) -> Metric:
        """Returns a value of this moment."""
        family = GaugeMetricFamily(f"{self._prefix}_{name}", meaning, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def gauges(self, name: str, label: str, values: Mapping[str, float], meaning: str) -> Metric:
        """Returns values of this moment by one more label."""
        labels = [*self._labels, label]
        family = GaugeMetricFamily(f"{self._prefix}_{name}", meaning, labels=labels)
        for value, number in values.items():
            family.add_metric([*self._labels.values(), value], number)
        return family

    def info(self, name: str, labels: Mapping[str, str], meaning: str) -> Metric:
        """Returns the value 1 with facts as labels."""
        family = GaugeMetricFamily(
            f"{self._prefix}_{name}", meaning, labels=[*self._labels, *labels]
        )
        family.add_metric([*self._labels.values(), *labels.values()], 1)
        return family

    def counter(self, name: str, value: float, meaning: str) -> Metric:
        """Returns a total since the start; its name gets the suffix `_total`."""
        family = CounterMetricFamily(f"{self._prefix}_{name}", meaning, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def counters(self, name: str, label: str, counts: Mapping[str, float], meaning: str) -> Metric:
        """Returns totals since the start by one more label."""
        labels = [*self._labels, label]
        family = CounterMetricFamily(f"{self._prefix}_{name}", meaning, labels=labels)
        for value, count in sorted(counts.items()):
            family.add_metric([*self._labels.values(), value], count)
        return family

    def histogram(self, name: str, histogram: Histogram, meaning: str) -> Metric:
        """Returns a histogram."""
        family = HistogramMetricFamily(f"{self._prefix}_{name}", meaning, labels=list(self._labels))
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, histogram.sum)
        return family

    def loop_lag(self, lag: LoopLag) -> Iterable[Metric]:
        """Returns how an event loop gets on."""
        yield self.histogram("event_loop_lag_seconds", lag.waits, "Time that due work waited")
        yield self.histogram(
            "event_loop_cpu_seconds", lag.cpu, "CPU of the event loop in intervals of 20 ms"
        )
