"""The figures of adapters for Prometheus."""

from collections.abc import Iterable
from typing import Any

from services.engine.core.adapter_figures import AdapterFigures
from services.engine.scheduler.stats import SchedulerCounts
from services.telemetry.metrics import Families


def adapter_families(
    families: Families, figures: AdapterFigures, done: SchedulerCounts
) -> Iterable[Any]:
    """Yields the figures of an engine with room for adapters.

    The first has vLLM's labels, which gateways read to route requests.
    """
    gauge, counter = families.gauge, families.counter
    yield families.info(
        "lora_requests_info",
        {
            "max_lora": str(figures.num_slots),
            "waiting_lora_adapters": ",".join(sorted(figures.waiting)),
            "running_lora_adapters": ",".join(sorted(figures.running)),
        },
        "1, with the slots and the adapters of running and waiting requests",
    )
    yield gauge("adapters_known", figures.num_known, "Adapters that requests may name")
    yield gauge("adapters_resident", figures.num_resident, "Adapters in slots of the device")
    yield counter("adapters_read", figures.num_read, "Adapters read into the host's memory")
    yield counter("adapters_read_seconds", figures.read_s, "Time of these reads")
    yield counter("adapter_slot_loads", done.num_adapter_loads, "Adapters copied into a slot")
    yield counter("adapter_evictions", done.num_adapter_evictions, "Slots taken from another one")
    yield gauge(
        "adapter_requests_waiting_for_slot",
        figures.num_waiting_for_slot,
        "Waiting requests whose adapter is in no slot",
    )
    yield families.gauges(
        "adapter_requests_running",
        "adapter",
        figures.running,
        "Running requests of the adapters that have most of them",
    )
