"""The prefixes that running requests share: valid, and saving as much as any choice."""

from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings

from models import forward_context
from services.engine.batch import read_int32
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.scheduler import shared_prefixes
from services.engine.scheduler.shared_prefixes import (
    MOST_NESTED,
    MOST_TILES,
    TILE_QUERIES,
    SharedPrefixFinder,
    pays,
)
from tests.support.prefix_trees import prefix_trees
from tests.support.requests import make_request
from tests.support.scheduler_rig import BLOCK_SIZE, Rig

SHORTEST = BLOCK_SIZE


def limits_of(**others):
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 4096}
    sizes |= {"block_size": BLOCK_SIZE, "vocab_size": 97, "shared_prefix_tokens": SHORTEST}
    return StepLimits(**sizes | others)


def most_saved(tables, depth=0, start=0, num_left=MOST_NESTED):
    """Returns the blocks that the best choice of prefixes saves, from the whole tree."""
    branches = {}
    for table in tables:
        if len(table) > depth:
            branches.setdefault(table[depth], []).append(table)
    best = 0
    for branch in branches.values():
        end = depth + 1
        ways = [most_saved(branch, end, start, num_left)]
        if num_left and pays(len(branch), (end - start) * BLOCK_SIZE, least_saved=SHORTEST):
            here = (len(branch) - 1) * (end - start)
            ways.append(here + most_saved(branch, end, end, num_left - 1))
        best += max(ways)
    return best


def check(found):
    """Checks that prefixes are shared, and that they form trees."""
    before = {}
    for group, start, end in sorted(found, key=lambda prefix: prefix.end):
        assert len({tuple(request.block_ids[:end]) for request in group}) == 1
        assert min(len(request.block_ids) for request in group) >= end > start
        (ends,) = {tuple(before.get(id(request), [0])) for request in group}
        assert ends[-1] == start
        for request in group:
            before.setdefault(id(request), [0]).append(end)
    assert all(len(ends) - 1 <= MOST_NESTED for ends in before.values())


@settings(max_examples=200, deadline=None)
@given(prefix_trees())
def test_the_prefixes_are_shared_and_no_choice_saves_more(tables):
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    found = SharedPrefixFinder(limits_of()).find(requests)
    check(found)
    assert sum(each.num_saved for each in found) == most_saved(tables)


def found_in(tables, **limits):
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    found = SharedPrefixFinder(limits_of(**limits)).find(requests)
    check(found)
    return sorted((len(group), start, end) for group, start, end in found)


def test_prefixes_are_nested_where_each_pays_by_itself():
    system = list(range(1, 41))
    tables = [[*system, *([100 + i // 6] * 30), 200 + i] for i in range(12)]
    assert found_in(tables) == [(6, 40, 70), (6, 40, 70), (12, 0, 40)]
    # Then the groups' own blocks save too little, or the common ones do.
    least = {"shared_prefix_tokens": 5 * 31 * BLOCK_SIZE}
    assert found_in(tables, **least) == [(6, 0, 70), (6, 0, 70)]
    short = [[*system, 100 + i // 6, 200 + i] for i in range(12)]
    assert found_in(short, **least) == [(12, 0, 40)]
    tables = [[1, *range(100 * (i // 6 + 1), 100 * (i // 6 + 1) + 40), 900 + i] for i in range(12)]
    least = {"shared_prefix_tokens": 20 * BLOCK_SIZE}
    assert found_in(tables, **least) == [(6, 0, 41), (6, 0, 41)]


def test_of_many_levels_those_are_chosen_that_save_most():
    # Each level is of fewer requests: 24, 20, .., 4, and one block longer.
    tables = [
        [*range(1, 2 + level), *([1000 + 10 * level + i] * 5), 5000 + 10 * level + i]
        for level in range(6)
        for i in range(4)
    ]
    found = found_in(tables)
    assert len(found) == MOST_NESTED
    num_saved = sum((count - 1) * (end - start) for count, start, end in found)
    assert num_saved == most_saved(tables) < most_saved(tables, num_left=6)


def test_plans_have_the_sizes_that_the_model_has():
    assert (TILE_QUERIES, MOST_TILES, MOST_NESTED) == (
        forward_context.TILE_QUERIES,
        forward_context.MAX_PREFIX_TILES,
        forward_context.MAX_PREFIX_LEVELS,
    )


def test_the_prefixes_that_save_most_fit_the_plan():
    rig = Rig(
        num_blocks=8000, max_num_seqs=288, max_num_waiting=300, max_num_batched_tokens=600,
        max_model_len=64, shared_prefix_tokens=4,
    )  # fmt: skip
    starts = [[1000 + 20 * i + k for k in range(4 + 4 * (i > 67))] for i in range(72)]
    rig.add(*(make_request(each, max_tokens=1) for each in starts))
    while rig.scheduler.has_work:
        rig.step()
    rig.add(*(make_request([*starts[i % 72], i], max_tokens=9) for i in range(288)))
    counts, lengths = set(), set()
    while rig.scheduler.has_work:
        prefixes = rig.send().descriptor.attn_metadata.shared_prefixes
        rig.receive()
        counts.add(len(read_int32(prefixes.counts)))
        lengths.add(tuple(read_int32(prefixes.num_blocks)[-5:].tolist()))
    assert max(counts) == MOST_TILES
    assert (1, 2, 2, 2, 2) in lengths  # the four longer ones are among them


def test_of_one_prefix_as_many_requests_share_as_a_plan_has_room_for():
    most = MOST_TILES * TILE_QUERIES
    rig = Rig(
        num_blocks=8000, max_num_seqs=most + 20, max_num_waiting=most + 20,
        max_num_batched_tokens=8000, max_model_len=64, shared_prefix_tokens=4,
    )  # fmt: skip
    rig.add(make_request([1, 2, 3, 4], max_tokens=1))
    rig.step()
    rig.add(*(make_request([1, 2, 3, 4, 10 + i % 80], max_tokens=4) for i in range(most + 20)))
    shared = []
    while rig.scheduler.has_work:
        counts = rig.send().descriptor.attn_metadata.shared_prefixes.counts
        rig.receive()
        shared += read_int32(counts).tolist()
    assert max(shared) == most


def num_tiles(prefix, q_len):
    return -(-len(prefix.requests) * q_len // TILE_QUERIES)


@pytest.mark.parametrize("q_len", [1, 2, 5])
@settings(max_examples=200, deadline=None)
@given(tables=prefix_trees(max_requests=60))
def test_of_what_does_not_fit_a_plan_as_much_is_shared_as_fits(q_len, tables):
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    prefixes = SharedPrefixFinder(limits_of()).find(requests)
    with mock.patch.object(shared_prefixes, "MOST_TILES", 4):
        fitting = shared_prefixes._fitting(prefixes, q_len)
    check(fitting)
    assert [each.end for each in fitting] == sorted(each.end for each in fitting)
    num_used = sum(num_tiles(each, q_len) for each in fitting)
    num_wanted = sum(num_tiles(each, q_len) for each in prefixes)
    assert num_used <= 4
    # A prefix that is cut keeps a tile for each longer prefix.
    assert num_used >= min(num_wanted, 4 - MOST_NESTED)


@pytest.mark.parametrize(("q_len", "num_requests"), [(1, 1100), (2, 600)])
def test_more_requests_than_a_plan_holds_share_a_prefix_and_longer_ones(q_len, num_requests):
    system = list(range(1, 41))
    tables = [
        [*system, *([100 + i // 16] * 60 if i < 128 else []), 1000 + i] for i in range(num_requests)
    ]
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    prefixes = SharedPrefixFinder(limits_of()).find(requests)
    assert [len(each.requests) for each in prefixes] == [num_requests, *([16] * 8)]
    fitting = shared_prefixes._fitting(prefixes, q_len)
    check(fitting)
    assert sum(num_tiles(each, q_len) for each in fitting) == MOST_TILES
    counts = [(len(each.requests), each.start, each.end) for each in fitting]
    others = MOST_TILES * TILE_QUERIES // q_len - 128
    # Those of longer prefixes read all of their blocks in these, and leave others room.
    assert counts == [(others, 0, 40), *([(16, 0, 100)] * 8)]


def test_a_prefix_that_is_cut_cuts_all_longer_ones_of_its_requests():
    """Workers refuse a prefix of requests that do not all have the same ones before it."""
    tables = [
        [1, *range(2, 42), *range(1000 * (i // 12 + 1), 1000 * (i // 12 + 1) + 40), 10**6 + i]
        for i in range(408)
    ] + [[1, 2 * 10**6 + i] for i in range(192)]
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    fitting = shared_prefixes._fitting(SharedPrefixFinder(limits_of()).find(requests), 1)
    check(fitting)
    assert sum(num_tiles(each, 1) for each in fitting) <= MOST_TILES
    counts = [(len(each.requests), each.start, each.end) for each in fitting]
    assert counts[:3] == [(32, 0, 1), (376, 0, 41), (32, 1, 41)]
    assert sorted(counts[3:]) == [(4, 41, 81), (8, 41, 81), *([(12, 41, 81)] * 33)]


def test_the_first_group_of_layers_is_looked_at():
    limits = limits_of(
        layer_groups=(
            SimpleNamespace(window=None, layers=(0,)),
            SimpleNamespace(window=8, layers=(1,)),
        )
    )
    # The second group has left its window, or has blocks of its own.
    tables = [[1, 0, 2, 0, 3, 50 + i, 60 + i, 70 + i] for i in range(8)]
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    ((group, start, end),) = SharedPrefixFinder(limits).find(requests)
    assert (len(group), start, end) == (8, 0, 3)


@pytest.mark.parametrize(
    ("num_requests", "num_tokens", "expected"),
    [(4, 10_000, True), (3, 10_000, False), (4, 512, False), (4, 3000, False), (12, 3000, True)],
)
def test_few_requests_and_short_prefixes_do_not_pay(num_requests, num_tokens, expected):
    assert LEAST_SHARING_REQUESTS == 4
    assert pays(num_requests, num_tokens, least_saved=30_000) is expected


class Watched(Rig):
    """A rig that checks the prefixes of every step against the running requests."""

    def __init__(self, **options):
        super().__init__(
            num_blocks=options.pop("num_blocks", 200), max_num_seqs=16, max_num_waiting=64,
            max_num_batched_tokens=64, max_model_len=256, **options,
        )  # fmt: skip
        self.seen = deque()

    def send(self):
        step = super().send()
        attention = step.descriptor.attn_metadata
        prefixes = attention.shared_prefixes
        row_ids = read_int32(attention.row_ids).tolist()
        seq_lens = read_int32(attention.seq_lens).tolist()
        starts = read_int32(attention.query_start_loc).tolist()
        by_row = {request.row: request for request in self.scheduler.running}
        counts = read_int32(prefixes.counts).tolist()
        members = iter(read_int32(prefixes.requests).tolist())
        before = {}
        for count, length in zip(counts, read_int32(prefixes.num_blocks).tolist(), strict=True):
            requests = [next(members) for _ in range(count)]
            assert all(starts[each + 1] - starts[each] == 1 for each in requests)
            assert all(seq_lens[each] > length * BLOCK_SIZE for each in requests)
            tables = {tuple(by_row[row_ids[each]].block_ids[:length]) for each in requests}
            assert len(tables) == 1
            assert len(tables.pop()) == length
            assert len({before.get(each, 0) for each in requests}) == 1
            assert before.get(requests[0], 0) < length
            before |= dict.fromkeys(requests, length)
        self.seen.append(counts)
        return step


SYSTEM = list(range(1, 41))


def requests_after(prefix, count, **options):
    return [make_request([*prefix, 50 + i, 60 + i], **options) for i in range(count)]


def test_decodes_of_requests_with_one_beginning_share_it_until_they_end():
    rig = Watched(shared_prefix_tokens=8)
    rig.add(make_request(SYSTEM, max_tokens=2))
    rig.step()
    requests = requests_after(SYSTEM, 6, max_tokens=12)
    rig.add(*requests)
    while rig.scheduler.has_work:
        rig.step()
        if len(rig.seen) == 6:
            rig.scheduler.abort(requests[0])
    assert max(rig.seen) == [6]
    assert [5] in rig.seen
    assert rig.seen[-1] == [5]


def test_preempted_requests_leave_and_come_back():
    rig = Watched(shared_prefix_tokens=8, num_blocks=40)
    rig.add(make_request(SYSTEM, max_tokens=1))
    rig.step()
    rig.add(*requests_after(SYSTEM, 8, max_tokens=40))
    while rig.scheduler.has_work:
        rig.step()
    assert rig.scheduler.counts.num_preemptions > 0
    assert [8] in rig.seen
    assert any(0 < sum(counts) < 8 for counts in rig.seen)


def test_requests_of_other_salts_share_nothing():
    rig = Watched(shared_prefix_tokens=8)
    for salt in ("a", "b"):
        rig.add(make_request(SYSTEM, max_tokens=1, cache_salt=salt))
    rig.step()
    rig.step()
    rig.add(*requests_after(SYSTEM, 5, max_tokens=8, cache_salt="a"))
    rig.add(*requests_after(SYSTEM, 5, max_tokens=8, cache_salt="b"))
    while rig.scheduler.has_work:
        rig.step()
    assert [5, 5] in rig.seen


def test_steps_without_the_flag_have_no_prefixes():
    rig = Watched()
    rig.add(make_request(SYSTEM, max_tokens=1))
    rig.step()
    rig.add(*requests_after(SYSTEM, 6, max_tokens=8))
    while rig.scheduler.has_work:
        rig.step()
    assert not any(rig.seen)
