"""The worker's words about its host memory and disk, for the scheduler."""

from protos.engine.v1.worker_pb2 import DiskReport, WorkerReady
from services.engine.kv_cache.host_tier import ENTRY_BYTES, DiskNews, HostLimits


def read_host_limits(ready: WorkerReady) -> HostLimits:
    """Returns the sizes that a worker announced."""
    return HostLimits(
        num_slots=ready.num_host_slots,
        max_step_loads=ready.max_step_loads,
        block_load_s=ready.block_load_s,
        disk_entries=_entries(ready.disk_entries) if ready.has_disk else None,
    )


def read_disk_report(report: DiskReport) -> DiskNews:
    """Returns what has changed on the disk."""
    return DiskNews(
        added=_entries(report.added),
        removed=_entries(report.removed),
        arrived=_entries(report.arrived),
        failed=_entries(report.failed),
        read_us=report.read_us,
        num_faults=report.num_faults,
        num_drops=report.num_drops,
    )


def _entries(data: bytes) -> list[bytes]:
    return [data[start : start + ENTRY_BYTES] for start in range(0, len(data), ENTRY_BYTES)]
