"""The prefixes that running requests share: valid, and saving as much as any choice."""

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given, settings

from services.engine.batch import read_int32
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.scheduler.shared_prefixes import SharedPrefixFinder, pays
from tests.support.prefix_trees import prefix_trees
from tests.support.requests import make_request
from tests.support.scheduler_rig import BLOCK_SIZE, Rig

SHORTEST = BLOCK_SIZE


def limits_of(**others):
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 4096}
    sizes |= {"block_size": BLOCK_SIZE, "vocab_size": 97, "shared_prefix_tokens": SHORTEST}
    return StepLimits(**sizes | others)


def saved(num_requests, num_blocks):
    return (num_requests - 1) * num_blocks


def most_saved(tables, depth=0):
    """Returns the blocks that the best choice of prefixes saves, from the whole tree."""
    branches = {}
    for table in tables:
        if len(table) > depth:
            branches.setdefault(table[depth], []).append(table)
    best = 0
    for branch in branches.values():
        here = 0
        if pays(len(branch), (depth + 1) * BLOCK_SIZE, least_saved=SHORTEST):
            here = saved(len(branch), depth + 1)
        best += max(here, most_saved(branch, depth + 1))
    return best


@settings(max_examples=300, deadline=None)
@given(prefix_trees())
def test_the_prefixes_are_shared_and_no_choice_saves_more(tables):
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    found = SharedPrefixFinder(limits_of()).find(requests)
    members = [id(request) for group, _ in found for request in group]
    assert len(set(members)) == len(members)
    for group, num_blocks in found:
        assert len({tuple(request.block_ids[:num_blocks]) for request in group}) == 1
        assert min(len(request.block_ids) for request in group) >= num_blocks > 0
    assert sum(saved(len(group), length) for group, length in found) == most_saved(tables)


def test_one_long_prefix_beats_several_that_save_less():
    system = list(range(1, 41))
    tables = [[*system, 100 + i // 6, 200 + i] for i in range(12)]
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    ((group, length),) = SharedPrefixFinder(limits_of()).find(requests)
    assert (len(group), length) == (12, 40)
    tables = [[1, *range(100 * (i // 6 + 1), 100 * (i // 6 + 1) + 40), 900 + i] for i in range(12)]
    requests = [SimpleNamespace(block_ids=table) for table in tables]
    found = SharedPrefixFinder(limits_of()).find(requests)
    assert [(len(group), length) for group, length in found] == [(6, 41)] * 2


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
    ((group, length),) = SharedPrefixFinder(limits).find(requests)
    assert (len(group), length) == (8, 3)


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
        for count, length in zip(counts, read_int32(prefixes.num_blocks).tolist(), strict=True):
            requests = [next(members) for _ in range(count)]
            assert all(starts[each + 1] - starts[each] == 1 for each in requests)
            assert all(seq_lens[each] > length * BLOCK_SIZE for each in requests)
            tables = {tuple(by_row[row_ids[each]].block_ids[:length]) for each in requests}
            assert len(tables) == 1
            assert len(tables.pop()) == length
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
