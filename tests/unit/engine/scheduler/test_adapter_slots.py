"""Slots of adapters: loaded before use, never taken from running requests, and fairly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.adapter import Adapter
from services.engine.request import RequestStatus
from services.engine.scheduler.adapter_slots import AdapterSlots
from services.engine.scheduler.stats import SchedulerCounts
from tests.support.data_parallel_rig import DataParallelRig
from tests.support.requests import make_request
from tests.support.scheduler_rig import Rig


def adapter(number: int) -> Adapter:
    return Adapter(name=f"a{number}", path="", digest=bytes([number]) * 32, rank=8, num_bytes=1024)


ADAPTERS = [adapter(number) for number in range(5)]


def is_over(request):
    return request.status is RequestStatus.FINISHED


class Slots:
    """The contents of a worker's slots, as its descriptors order them."""

    def __init__(self):
        self.contents = {}
        self.rows = {}

    def take(self, step, running):
        for load in step.descriptor.adapter_loads:
            self.contents[load.slot] = load.digest
        for each in step.descriptor.row_assignments:
            self.rows[each.row] = each.adapter_slot
        for request in running:
            slot = self.rows[request.row]
            if request.adapter is None:
                assert slot == 0
            else:
                assert self.contents[slot - 1] == request.adapter.digest


@given(
    num_slots=st.integers(1, 3),
    num_blocks=st.integers(9, 30),
    choices=st.lists(st.sampled_from([None, *ADAPTERS]), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 12), min_size=8, max_size=8),
)
@settings(max_examples=40)
def test_rows_point_at_slots_that_hold_their_adapter(num_slots, num_blocks, choices, lengths):
    rig = Rig(num_blocks=num_blocks, max_model_len=32, num_adapter_slots=num_slots)
    requests = [
        make_request(length, adapter=chosen, max_tokens=length)
        for chosen, length in zip(choices, lengths, strict=False)
    ]
    rig.add(*requests)
    slots = Slots()
    for _ in range(400):
        if all(map(is_over, requests)):
            break
        step = rig.scheduler.schedule()
        if step is not None:
            slots.take(step, rig.scheduler.running)
            rig.in_flight.append(step)
        if step is None or len(rig.in_flight) == 2:
            rig.receive()
    assert all(map(is_over, requests))


@given(
    num_slots=st.integers(1, 3),
    choices=st.lists(st.sampled_from([None, *ADAPTERS]), min_size=2, max_size=8),
    failed=st.sets(st.integers(1, 12), max_size=2),
)
@settings(max_examples=40)
def test_ranks_that_compute_each_others_tokens_have_the_same_slots(num_slots, choices, failed):
    rig = DataParallelRig(num_adapter_slots=num_slots, shares_slots=True)
    requests = [make_request(4, adapter=each, max_tokens=3) for each in choices]
    rig.add(*requests)
    ranks = [Slots(), Slots()]
    for number in range(200):
        step = rig.scheduler.schedule()
        if step is not None:
            parts = (step, *step.others)
            for slots, part, rank in zip(ranks, parts, rig.ranks, strict=True):
                slots.take(part, rank.running)
            assert ranks[0].contents == ranks[1].contents
            if number in failed:
                rig.scheduler.retreat([*rig.in_flight, step])
                rig.in_flight.clear()
                # The slots are empty: no step that filled them was computed.
                assert not rig.scheduler.adapter_slots
                return
            rig.in_flight.append(step)
        if step is None or len(rig.in_flight) == 2:
            if not rig.in_flight:
                break
            rig.receive()
    assert all(map(is_over, requests))


def test_the_adapter_that_was_used_least_recently_leaves_first():
    counts = SchedulerCounts()
    slots = AdapterSlots(2, counts)
    for each in ADAPTERS[:2]:
        slots.take(each)
    for each in ADAPTERS[:2]:
        slots.release(each)
    slots.take(ADAPTERS[0])
    slots.release(ADAPTERS[0])
    slots.take_loads()
    assert slots.has_room(ADAPTERS[2])
    assert slots.take(ADAPTERS[2]) == slots.take_loads()[0][0] + 1
    assert set(slots.by_digest) == {ADAPTERS[0].digest, ADAPTERS[2].digest}
    slots.take(ADAPTERS[0])
    assert not slots.has_room(ADAPTERS[1])
    assert slots.has_room(ADAPTERS[2])
    assert slots.has_room(None)
    assert (counts.num_adapter_loads, counts.num_adapter_evictions) == (3, 1)


def test_an_endless_flood_of_one_adapter_does_not_starve_another():
    rig = Rig(num_adapter_slots=1, max_num_seqs=2, max_num_waiting=64)
    rig.add(*(make_request(4, adapter=ADAPTERS[0], max_tokens=3) for _ in range(4)))
    victim = make_request(4, adapter=ADAPTERS[1], max_tokens=3)
    rig.add(victim)
    for number in range(100):
        if is_over(victim):
            break
        if number % 2:
            rig.add(make_request(4, adapter=ADAPTERS[0], max_tokens=3))
        rig.send()
        rig.receive()
    assert is_over(victim)


def test_requests_of_different_adapters_share_no_prefix():
    rig = Rig(num_adapter_slots=2)
    prompt = list(range(16))
    for chosen in (ADAPTERS[0], ADAPTERS[1], None, ADAPTERS[0]):
        request = make_request(prompt, adapter=chosen, max_tokens=1)
        rig.add(request)
        rig.send()
        rig.receive()
        last = request.num_cached_tokens
        if request.adapter is not ADAPTERS[0]:
            assert last == 0
    assert last > 0


def test_an_endless_flood_on_one_rank_does_not_starve_another():
    rig = DataParallelRig(num_blocks=65, num_adapter_slots=1, shares_slots=True, max_num_waiting=32)

    def flood(number):
        """Adds a request to the rank that has the blocks of its prefix."""
        rig.add(make_request([*range(24), 30 + number], adapter=ADAPTERS[0], max_tokens=12))

    flood(0)
    for _ in range(4):
        rig.send()
        rig.receive()
    victim = make_request(4, adapter=ADAPTERS[1], max_tokens=3)
    rig.add(victim)
    assert victim.data_parallel_rank == 1
    for number in range(100):
        if number % 6 == 0:
            flood(number % 30)
        if rig.send() is not None:
            rig.receive()
    assert is_over(victim)


def test_a_request_that_is_gone_keeps_no_slot_from_those_of_other_ranks():
    rig = DataParallelRig(num_adapter_slots=1, shares_slots=True)
    first, gone, last = (
        make_request(4, adapter=ADAPTERS[number], max_tokens=3) for number in (0, 1, 0)
    )
    rig.add(first, gone)
    while not is_over(first):
        rig.send()
        rig.receive()
    rig.scheduler.abort(gone)
    rig.add(last)
    rig.run()
    assert is_over(last)
