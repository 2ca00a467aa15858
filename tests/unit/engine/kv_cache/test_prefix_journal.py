"""Readers of a prefix index follow it, whatever they missed."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv_cache import prefix_journal
from services.engine.kv_cache.prefix_index import PrefixIndex
from services.engine.kv_cache.prefix_journal import PrefixChanges

MANY = 1000


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def follow(known: set[bytes], changes: PrefixChanges) -> set[bytes]:
    base = set() if changes.is_reset else known
    return (base - set(changes.removed)) | set(changes.added)


def changes_since(index, cursor, *, max_keys) -> PrefixChanges:
    return index.journal.since(cursor, index.keys(), max_keys=max_keys)


def test_the_first_reading_returns_all_keys():
    index = PrefixIndex()
    index.add(key(1), 1)
    changes = changes_since(index, None, max_keys=MANY)
    assert (changes.is_reset, changes.added) == (True, (key(1),))


def test_nothing_is_reported_twice():
    index = PrefixIndex()
    index.add(key(1), 1)
    cursor = changes_since(index, None, max_keys=MANY).cursor
    changes = changes_since(index, cursor, max_keys=MANY)
    assert (changes.is_reset, changes.added, changes.removed) == (False, (), ())


def test_a_reader_that_missed_too_much_gets_the_youngest_keys_again():
    index = PrefixIndex()
    cursor = changes_since(index, None, max_keys=2).cursor
    for number in range(4):
        index.add(key(number), number)
    changes = changes_since(index, cursor, max_keys=2)
    assert (changes.is_reset, changes.added) == (True, (key(2), key(3)))


def test_the_index_of_another_worker_begins_empty():
    first, second = PrefixIndex(), PrefixIndex()
    first.add(key(1), 1)
    second.add(key(2), 1)
    cursor = changes_since(first, None, max_keys=MANY).cursor
    changes = changes_since(second, cursor, max_keys=MANY)
    assert (changes.is_reset, changes.added) == (True, (key(2),))


def test_what_is_remembered_is_bounded():
    index = PrefixIndex()
    cursor = changes_since(index, None, max_keys=MANY).cursor
    for _ in range(prefix_journal.MAX_ENTRIES):
        index.add(key(1), 1)
        index.forget(1)
    assert changes_since(index, cursor, max_keys=10**6).is_reset


@given(
    st.lists(st.one_of(st.tuples(st.booleans(), st.integers(0, 7)), st.none()), max_size=60),
    st.integers(1, 8),
)
def test_a_reader_knows_the_index_after_each_reading(changes, max_keys):
    index, known, cursor, is_whole = PrefixIndex(), set(), None, False
    present: dict[int, bytes] = {}
    for change in [*changes, None]:
        if change is None:  # a reading
            news = changes_since(index, cursor, max_keys=max_keys)
            known, cursor = follow(known, news), news.cursor
            if news.is_reset:
                is_whole = len(present) <= max_keys
            assert known == set(present.values()) or not is_whole
            assert known <= set(present.values())
        elif change[0] and change[1] not in present:
            index.add(key(change[1]), change[1])
            present[change[1]] = key(change[1])
        elif not change[0]:
            index.forget(change[1])
            present.pop(change[1], None)
