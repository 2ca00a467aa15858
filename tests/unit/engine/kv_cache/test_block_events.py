"""Subscribers know the cached blocks, whenever they come and however slowly they read."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.adapter import Adapter
from services.engine.kv_cache import block_events
from services.engine.kv_cache.block_events import (
    MAX_EVENTS,
    BlockContent,
    BlockEvents,
    Cleared,
    Stored,
    Tier,
)
from services.engine.kv_cache.cache import KVCache
from services.engine.kv_cache.host_tier import HostLimits, HostTier, tier_entry
from services.engine.kv_cache.prefix_journal import BlockJournal, JointPrefixJournal
from services.engine.kv_cache.tiered_cache import TieredKVCache
from tests.support.block_replica import BlockReplica
from tests.support.requests import make_request

BLOCK_SIZE = 4
FIRST = BlockContent(None, b"")


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store"] * 6 + ["remove"] * 4 + ["read", "clear"]),
            st.integers(0, 30),
            st.sampled_from(list(Tier)),
        ),
        min_size=300,
        max_size=600,
    )
)
def test_subscribers_have_the_blocks_of_every_tier(operations):
    record, replica, held = BlockEvents(), BlockReplica(), set()
    for operation, number, tier in operations:
        each = (key(number), tier)
        if operation == "store" and each not in held:
            parent = key(number - 1) if number else None
            record.stored(key(number), BlockContent(parent, b""), tier)
            held.add(each)
        elif operation == "remove":
            record.removed(*each)
            held.discard(each)
        elif operation == "clear" and number == 0:
            record.clear()
            held.clear()
        elif operation == "read":
            late = BlockReplica()
            replica.read(record)
            late.read(record)
            assert replica.blocks.keys() == late.blocks.keys() == held


def test_a_snapshot_has_parents_before_children():
    record = BlockEvents()
    for number in (3, 2, 1, 7):
        record.stored(key(number), BlockContent(key(number - 1), b""), Tier.GPU)
    _, blocks = record.snapshot()
    assert [block.key for block in blocks] == [key(1), key(2), key(3), key(7)]


def test_a_subscriber_that_missed_too_much_gets_a_snapshot_and_no_more_is_kept():
    record, replica = BlockEvents(), BlockReplica()
    replica.read(record)
    for _ in range(MAX_EVENTS):
        record.stored(key(1), FIRST, Tier.GPU)
        record.removed(key(1), Tier.GPU)
    record.stored(key(2), FIRST, Tier.GPU)
    number, _ = record.snapshot()
    assert record.since(replica.number) is None
    kept = record.since(number - MAX_EVENTS // block_events.MAX_BATCH_EVENTS)
    assert sum(len(batch.events) for batch in kept) <= MAX_EVENTS
    replica.read(record)
    assert (replica.keys(), replica.num_snapshots) == ({key(2)}, 2)


def test_numbers_of_an_earlier_process_are_not_known():
    earlier, later = BlockEvents(lambda: 5_000_000), BlockEvents(lambda: 9_000_000)
    for record in (earlier, later):
        record.stored(key(1), FIRST, Tier.GPU)
    number, _ = earlier.snapshot()
    assert later.since(number) is None
    assert earlier.since(later.snapshot()[0]) is None


def test_a_lost_worker_clears_all_blocks_and_the_numbers_go_on():
    record = BlockEvents()
    record.stored(key(1), FIRST, Tier.HOST)
    number, _ = record.snapshot()
    record.clear()
    record.clear()
    [batch] = record.since(number)
    assert (batch.number, batch.events) == (number + 1, (Cleared(),))


def compute(cache: KVCache, request) -> None:
    prefix = cache.match_prefix(request)
    cache.take_prefix(request, prefix, len(request.token_ids))
    assert cache.allocate(request, len(request.token_ids)) is not None
    request.num_computed_tokens = len(request.token_ids)
    cache.free(request)


def cache_of(record: BlockEvents) -> KVCache:
    return KVCache(
        num_blocks=9,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        journal=BlockJournal(events=record),
    )


def test_blocks_come_with_their_parents_and_tokens():
    record = BlockEvents()
    compute(cache_of(record), make_request(range(9)))
    _, [first, second] = record.snapshot()
    assert (first.content.parent, second.content.parent) == (None, first.key)
    assert list(memoryview(second.content.token_ids).cast("i")) == [4, 5, 6, 7]


def test_a_request_with_a_salt_leaves_no_trace():
    record = BlockEvents()
    cache = cache_of(record)
    number, _ = record.snapshot()
    compute(cache, make_request(range(32), cache_salt="tenant"))
    assert record.since(number) == []
    compute(cache, make_request(range(100, 132)))  # takes its blocks away
    assert all(isinstance(each, Stored) for batch in record.since(number) for each in batch.events)
    assert len(record.snapshot()[1]) == 8


def test_blocks_of_an_adapter_have_its_name_and_keys_of_their_own():
    record = BlockEvents()
    cache = cache_of(record)
    plain, adapted = make_request(range(12)), make_request(range(12))
    adapted.adapter = Adapter(name="a", path="", digest=b"d" * 32, rank=1, num_bytes=1)
    compute(cache, plain)
    compute(cache, adapted)
    blocks = record.snapshot()[1]
    assert [each.content.adapter for each in blocks] == ["", "", "", "a", "a", "a"]
    assert len({each.key for each in blocks}) == 6
    assert [each.content.parent for each in blocks[3:]] == [None, blocks[3].key, blocks[4].key]


def test_blocks_that_leave_the_gpu_are_known_where_they_go():
    record, prefixes = BlockEvents(), JointPrefixJournal()
    cache = TieredKVCache(
        HostTier(HostLimits(num_slots=100, max_step_loads=100)),
        num_blocks=9,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        disk=[tier_entry(key(1), 0), tier_entry(key(2), 1)],
        journal=BlockJournal(prefixes, record),
    )
    known = prefixes.since(None, (), max_keys=100)
    assert known.added == (key(1),), "of the first layer group alone"
    request = make_request(range(16))
    compute(cache, request)
    compute(cache, make_request(range(100, 132)))  # takes its blocks away
    replica = BlockReplica()
    replica.read(record)
    assert set(request.block_keys) <= replica.keys(Tier.HOST) - replica.keys(Tier.GPU)
    replica.check_contents(BLOCK_SIZE)
    changes = prefixes.since(known.cursor, (), max_keys=100)
    assert set(request.block_keys) <= set(changes.added), "it comes back from the host"
    entry = tier_entry(request.block_keys[0], 0)
    cache.change_disk(added=[entry, entry], removed=[tier_entry(key(1), 0)])
    replica.read(record)
    assert replica.keys(Tier.DISK) == {request.block_keys[0]}
    assert key(1) in prefixes.since(changes.cursor, (), max_keys=100).removed
