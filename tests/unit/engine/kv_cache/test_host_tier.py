"""Slots of the host's memory: which content is where, from which step on."""

from services.engine.kv_cache.host_tier import HostLimits, HostTier, tier_entry

A, B, C = (tier_entry(bytes([number]) * 32, 0) for number in range(3))


def tier(num_slots=2, max_step_loads=4) -> HostTier:
    return HostTier(HostLimits(num_slots=num_slots, max_step_loads=max_step_loads))


def test_content_is_present_from_the_next_step_on():
    host = tier()
    host.store(A, 7)
    assert A not in host
    assert host.take_copies(1).stored == [(7, 0)]
    assert A in host
    assert host.take_copies(2) is None


def test_content_that_is_present_is_not_stored_again():
    host = tier()
    host.store(A, 7)
    host.take_copies(1)
    host.store(A, 9)
    assert not host.has_copies


def test_the_slot_used_least_lately_is_reused_even_while_the_step_loads_from_it():
    host = tier()
    host.store(A, 1)
    host.store(B, 2)
    host.take_copies(1)
    host.load(host.use(A), 5)
    host.load(host.use(B), 6)
    host.store(C, 3)
    copies = host.take_copies(2)
    assert copies.loaded == [(0, 5), (1, 6)]
    assert copies.stored == [(3, 0)]
    assert A not in host
    assert B in host
    assert C in host


def test_a_step_stores_no_more_than_there_are_slots():
    host = tier()
    for block_id, entry in enumerate((A, B, C)):
        host.store(entry, block_id)
    assert len(host.take_copies(1).stored) == 2
    assert C not in host


def test_a_block_filled_with_other_content_is_not_loaded():
    host = tier()
    host.store(A, 1)
    host.take_copies(1)
    host.load(host.use(A), 5)
    host.store(B, 5)  # its content is that of A, which comes with this step
    host.cancel_load(5)
    assert not host.has_copies
    assert host.counts.num_loaded == 0


def test_a_retreat_forgets_only_what_is_in_flight():
    host = tier(num_slots=4)
    host.store(A, 1)
    host.take_copies(1)
    host.settle(1)
    host.store(B, 2)
    host.load(host.use(A), 5)
    assert host.read(C)
    host.take_copies(2)
    assert host.retreat() == ([5], [C])
    assert A in host
    assert B not in host
    assert not host.is_reading(C)
    host.end_read(C, has_arrived=True)  # the worker had begun it
    assert C not in host


def test_reads_leave_half_of_the_slots_alone():
    host = tier(num_slots=4)
    assert host.read_room == 2
    host.read(A)
    host.read(B)
    assert host.read_room == 0
    host.end_read(A, has_arrived=True)
    host.end_read(B, has_arrived=False)
    assert A in host
    assert B not in host
    assert host.read_room == 2
