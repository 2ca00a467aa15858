"""Figures of adapters: by name, bounded, and of requests without a slot."""

from services.engine.adapter import Adapter
from services.engine.core.adapter_figures import MOST_NAMES, AdapterFigures, ReadCounts
from services.engine.request import RequestStatus
from services.engine.rpc.adapter_metrics import adapter_families
from services.engine.scheduler.stats import SchedulerCounts
from services.telemetry.metrics import Families
from tests.support.requests import make_request


def adapter(number: int) -> Adapter:
    digest = number.to_bytes(2, "big") * 16
    return Adapter(name=f"a{number}", path="", digest=digest, rank=8, num_bytes=1024)


def running(chosen: Adapter | None):
    request = make_request(4, adapter=chosen)
    request.status = RequestStatus.RUNNING
    return request


def figures_of(requests, resident):
    counts = ReadCounts(num_read=5, read_s=1.5)
    return AdapterFigures.of(requests, frozenset(resident), counts, num_slots=2, num_known=4)


def test_requests_are_counted_by_the_name_of_their_adapter():
    first, second, third = map(adapter, range(3))
    requests = [running(first), running(first), running(None), running(second)]
    requests += [make_request(4, adapter=each) for each in (first, third, None)]
    figures = figures_of(requests, [first.digest, second.digest])
    assert figures.running == {"a0": 2, "a1": 1}
    assert figures.waiting == {"a0": 1, "a2": 1}
    assert (figures.num_resident, figures.num_waiting_for_slot) == (2, 1)


def test_names_are_bounded_to_those_with_most_requests():
    requests = [running(adapter(number)) for number in range(MOST_NAMES + 9)]
    requests += [running(adapter(MOST_NAMES + 8))]
    names = figures_of(requests, []).running
    assert len(names) == MOST_NAMES
    assert names[f"a{MOST_NAMES + 8}"] == 2


def test_gateways_find_adapters_under_the_labels_of_vllm():
    requests = [running(adapter(1)), running(adapter(0)), make_request(4, adapter=adapter(2))]
    done = SchedulerCounts(num_adapter_loads=7, num_adapter_evictions=3)
    families = {
        each.name: each
        for each in adapter_families(Families("octavo"), figures_of(requests, []), done)
    }
    [info] = families["octavo_lora_requests_info"].samples
    assert info.labels == {
        "max_lora": "2", "running_lora_adapters": "a0,a1", "waiting_lora_adapters": "a2"
    }  # fmt: skip
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["octavo_adapter_slot_loads"] == 7
    assert values["octavo_adapter_evictions"] == 3
    assert values["octavo_adapters_read_seconds"] == 1.5
