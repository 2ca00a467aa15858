"""Figures of several processes, published in memory that they share and read as one."""

import json
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from prometheus_client.core import Metric

from services.processes.shared_locks import SharedLocks

REGION_BYTES = 2**20
"""Room for the figures of one process."""
PUBLISH_INTERVAL_S = 1.0
"""How old the figures of other processes may be."""
_LENGTH = struct.Struct("=I")
_TOTALS = ("counter", "histogram")
_OF_THE_LEAST = {
    "octavo_frontend_engine_ready",
    "octavo_frontend_processes_serving",
    "process_max_fds",
    "process_start_time_seconds",
}
"""Figures whose joint value is the least, or below the most; that of others is the sum."""
_OF_THE_MOST = {
    "octavo_frontend_engines",
    "octavo_frontend_engines_used",
    "octavo_frontend_processes_lost_total",
}

log = structlog.get_logger()

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Family:
    """One family of figures, joined."""

    kind: str
    meaning: str
    samples: dict[_Key, float] = field(default_factory=dict)

    def add(self, name: str, key: _Key, value: float) -> None:
        known = self.samples.get(key)
        if known is None:
            self.samples[key] = value
        elif name in _OF_THE_LEAST:
            self.samples[key] = min(known, value)
        elif name in _OF_THE_MOST:
            self.samples[key] = max(known, value)
        else:
            self.samples[key] = known + value


class SharedFigures:
    """The figures of processes, made before they are forked.

    Totals of dead processes are kept, so that no total ever falls.
    """

    def __init__(self, num_processes: int) -> None:
        """Makes room for each process and for the totals of dead ones."""
        self._num_processes = num_processes
        self._memory = mmap.mmap(-1, (num_processes + 1) * REGION_BYTES)
        self._locks = SharedLocks()

    def publish(self, process: int, metrics: Iterable[Metric]) -> None:
        """Replaces the figures of a process."""
        families = _joined([_plain(metrics)])
        self._write(process, families)

    def has_published(self, process: int) -> bool:
        """Whether a process has published since its start."""
        return bool(self._read(process))

    def retire(self, process: int) -> None:
        """Keeps the totals of a process that died."""
        retired = self._num_processes
        families = _joined([self._read(retired), self._read(process)])
        totals = {name: each for name, each in families.items() if each.kind in _TOTALS}
        self._write(retired, totals)
        self._write(process, {})

    def joint(self) -> Iterator[Metric]:
        """Yields the figures of all processes as one."""
        for name, family in _joined(
            [self._read(region) for region in range(self._num_processes + 1)]
        ).items():
            metric = Metric(name, family.meaning, family.kind)
            for (sample, labels), value in family.samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric

    def _read(self, region: int) -> list[Any]:
        start = region * REGION_BYTES
        with self._locks.hold(region):
            [length] = _LENGTH.unpack_from(self._memory, start)
            start += _LENGTH.size
            content = self._memory[start : start + length]
        return list(json.loads(content)) if content else []

    def _write(self, region: int, families: Mapping[str, _Family]) -> None:
        content = b""
        if families:
            content = json.dumps(
                [
                    [name, each.kind, each.meaning, list(each.samples.items())]
                    for name, each in families.items()
                ]
            ).encode()
        if len(content) + _LENGTH.size > REGION_BYTES:
            log.warning("figures_not_shared", num_bytes=len(content), limit=REGION_BYTES)
            return
        start = region * REGION_BYTES
        with self._locks.hold(region):
            _LENGTH.pack_into(self._memory, start, 0)  # the process may be killed amid this
            text = start + _LENGTH.size
            self._memory[text : text + len(content)] = content
            _LENGTH.pack_into(self._memory, start, len(content))


def _plain(metrics: Iterable[Metric]) -> list[Any]:
    return [
        [
            metric.name,
            metric.type,
            metric.documentation,
            [
                ((sample.name, sorted(sample.labels.items())), sample.value)
                for sample in metric.samples
            ],
        ]
        for metric in metrics
    ]


def _joined(regions: Iterable[list[Any]]) -> dict[str, _Family]:
    families: dict[str, _Family] = {}
    for region in regions:
        for name, kind, meaning, samples in region:
            family = families.setdefault(name, _Family(kind, meaning))
            for (sample, labels), value in samples:
                key = (sample, tuple((label, text) for label, text in labels))
                family.add(name, key, value)
    return families
