"""One subscriber of all ranks: snapshots, changes, and gaps."""

from services.engine.edge.kv_events import SNAPSHOT_BLOCKS, chains, follow
from services.engine.kv_cache.block_events import (
    MAX_EVENTS,
    BlockContent,
    BlockEvents,
    Cleared,
    Removed,
    Stored,
    Tier,
)

TOKENS = b"abcd"


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def block(number, parent=None, *, tier=Tier.GPU, tokens=TOKENS) -> Stored:
    return Stored(key(number), tier, BlockContent(parent and key(parent), tokens))


def store(record: BlockEvents, *blocks: Stored) -> None:
    for each in blocks:
        record.stored(each.key, each.content, each.tier)


def test_blocks_of_another_adapter_are_another_part():
    def of(number, parent, adapter):
        return Stored(key(number), Tier.GPU, BlockContent(parent and key(parent), TOKENS, adapter))

    events = [of(1, None, "a"), of(2, 1, "a"), of(3, 2, "b"), of(4, 3, ""), of(5, 4, "")]
    assert [len(part) for part in chains(events)] == [2, 1, 2]


async def test_each_rank_begins_with_a_snapshot_unless_its_cursor_is_known():
    ranks = [BlockEvents(), BlockEvents()]
    number, _ = ranks[1].snapshot()
    for record in ranks:
        store(record, block(1), block(2, 1))
    following = follow(dict(enumerate(ranks)), {1: number})
    first, second = [await anext(following) for _ in range(2)]
    assert (first.rank, first.index, first.count, len(first.events)) == (0, 0, 1, 2)
    assert (second.rank, second.number, second.count) == (1, number + 1, 0)
    await following.aclose()


async def test_a_reader_that_missed_too_much_gets_a_snapshot_in_parts():
    record = BlockEvents()
    following = follow({0: record}, {})
    await anext(following)
    for _ in range(MAX_EVENTS):
        store(record, block(1))
        record.removed(key(1), Tier.GPU)
    store(record, *(block(number) for number in range(SNAPSHOT_BLOCKS + 3)))
    parts = [await anext(following) for _ in range(2)]
    assert [(part.index, part.count, len(part.events)) for part in parts] == [
        (0, 2, SNAPSHOT_BLOCKS),
        (1, 2, 3),
    ]
    store(record, block(9999))
    later = await anext(following)
    assert (later.number, later.count) == (parts[-1].number + 1, 0)
    await following.aclose()


def test_events_are_split_where_a_chain_of_blocks_ends():
    events = [
        block(1), block(2, 1), block(3, 2, tokens=None), block(4, 3, tokens=None),
        block(6, 5), block(7, 6, tier=Tier.HOST), Removed(key(1), Tier.GPU),
        Removed(key(6), Tier.GPU), Removed(key(7), Tier.HOST), Cleared(), Cleared(),
    ]  # fmt: skip
    assert [len(part) for part in chains(events)] == [2, 2, 1, 1, 2, 1, 1, 1]
    assert [event for part in chains(events) for event in part] == events
