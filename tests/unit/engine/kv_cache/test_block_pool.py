"""The block pool, alone and with the prefix index on top, against a plain model."""

from array import array
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from services.engine.kv_cache.prefix_index import PrefixIndex


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(8)
    assert NULL_BLOCK not in pool.take(7)
    assert pool.num_free == 0


def test_blocks_free_for_longest_are_reused_first():
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    for block_id in (second, third, first):
        pool.release(block_id, keep_long=True)
    assert pool.take(3) == [second, third, first]


def test_a_block_without_content_worth_keeping_is_reused_before_all_others():
    pool = BlockPool(4)
    (block_id,) = pool.take(1)
    pool.release(block_id, keep_long=False)
    assert pool.take(1) == [block_id]


def test_a_free_block_that_is_shared_again_is_not_handed_out():
    pool = BlockPool(4)
    taken = pool.take(3)
    for block_id in taken:
        pool.release(block_id, keep_long=True)
    assert pool.share(taken[1])
    assert pool.take(2) == [taken[0], taken[2]]


def test_releasing_more_often_than_holding_is_a_bug():
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.release(block_id, keep_long=True)
    with pytest.raises(AssertionError):
        pool.release(block_id, keep_long=True)


def test_a_bundle_without_content_is_given_whole_and_before_all_others():
    pool = BlockPool(20)
    bundle = array("i", pool.take(5, as_bundle=True))
    pool.release_bundle(bundle, has_content=False)
    assert pool.num_free == 19
    assert pool.take_spare() == bundle
    assert pool.take_spare() is None
    pool.release_bundle(bundle, has_content=False)
    assert sorted(pool.take(5)) == sorted(bundle)


def test_a_bundle_with_content_is_reused_when_its_time_has_come():
    pool = BlockPool(11)
    first, second = (array("i", pool.take(5, as_bundle=True)) for _ in range(2))
    for bundle in (second, first):
        pool.release_bundle(bundle, has_content=True)
    assert pool.take_spare() is None
    pool.share_bundle(second)
    assert pool.num_free == 5
    assert pool.take(5, as_bundle=True) == list(first)
    pool.release_bundle(second, has_content=True)
    pool.forget_bundle(second)
    assert pool.take_spare() == second


def test_of_a_bundle_the_first_block_is_taken_first_and_others_follow():
    pool = BlockPool(11)
    first, second = (array("i", pool.take(5, as_bundle=True)) for _ in range(2))
    for bundle in (first, second):
        pool.release_bundle(bundle, has_content=True)
    [block_id] = pool.take(1)
    assert block_id == first[0]
    assert set(pool.take(4)) == set(first[1:])
    assert pool.take(1) == [second[0]]


def test_single_blocks_take_one_bundle_apart_and_leave_the_others_whole():
    pool = BlockPool(16)
    bundles = [array("i", pool.take(5, as_bundle=True)) for _ in range(3)]
    for bundle in bundles:
        pool.release_bundle(bundle, has_content=False)
    for _ in range(5):
        pool.take(1)
    assert pool.take_spare() is not None
    assert pool.take_spare() is not None
    assert pool.num_free == 0


def test_no_block_of_a_bundle_is_given_twice():
    """Single blocks and bundles of all kinds, at random, against a set of what is held."""
    random = Random(3)
    for _ in range(30):
        pool, single, bundles, known = BlockPool(40), [], [], []
        for _ in range(200):
            match random.randrange(7):
                case 0 if pool.num_free >= 3:
                    single += pool.take(random.randint(1, 3))
                case 1 if pool.num_free >= 5:
                    spare = pool.take_spare()
                    bundles.append(spare or array("i", pool.take(5, as_bundle=True)))
                case 2 if single:
                    block_id = single.pop(random.randrange(len(single)))
                    assert pool.release(block_id, keep_long=random.random() < 0.5)
                case 3 if bundles:
                    bundle = bundles.pop(random.randrange(len(bundles)))
                    pool.release_bundle(bundle, has_content=False)
                case 4 if bundles:
                    known.append(bundles.pop())
                    pool.release_bundle(known[-1], has_content=True)
                case 5 if known and pool.is_free(known[-1][0]):
                    pool.forget_bundle(known.pop())
                case 6 if known and pool.is_free(known[-1][0]):
                    bundles.append(known.pop())
                    pool.share_bundle(bundles[-1])
            held = [*single, *(block_id for bundle in bundles for block_id in bundle)]
            assert len(held) == len(set(held)) == 39 - pool.num_free
            # Blocks taken for others are no longer a bundle with content.
            known = [bundle for bundle in known if not set(bundle) & set(held)]


class PoolMachine(RuleBasedStateMachine):
    """Takes, shares, releases and indexes blocks as the cache does, beside a model of lists."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex()
        self.free = list(range(1, num_blocks))
        self.holders = dict.fromkeys(range(1, num_blocks), 0)
        self.block_by_key: dict[bytes, int] = {}

    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(0, len(self.free)))
        expected, self.free = self.free[:count], self.free[count:]
        assert self.pool.take(count) == expected
        for block_id in expected:
            self.holders[block_id] = 1
            known = {key for key, block in self.block_by_key.items() if block == block_id}
            assert self.index.forget(block_id) == bool(known)
            for key in known:
                del self.block_by_key[key]

    @precondition(lambda self: any(self.holders.values()))
    @rule(data=st.data(), keep_long=st.booleans())
    def release(self, data, keep_long):
        block_id = data.draw(st.sampled_from([b for b, n in self.holders.items() if n]))
        self.holders[block_id] -= 1
        became_free = not self.holders[block_id]
        assert self.pool.release(block_id, keep_long=keep_long) == became_free
        if became_free:
            self.free.insert(len(self.free) if keep_long else 0, block_id)

    @precondition(lambda self: any(self.holders.values()))
    @rule(data=st.data(), name=st.integers(0, 5))
    def add(self, data, name):
        held = [b for b, n in self.holders.items() if n and b not in self.index]
        if held:
            block_id, key = data.draw(st.sampled_from(held)), bytes([name])
            self.index.add(key, block_id)
            self.block_by_key.setdefault(key, block_id)

    @precondition(lambda self: self.block_by_key)
    @rule(data=st.data())
    def share(self, data):
        key = data.draw(st.sampled_from(sorted(self.block_by_key)))
        (block_id,) = self.index.find([key])
        assert block_id == self.block_by_key[key]
        assert self.pool.share(block_id) == (block_id in self.free)
        self.holders[block_id] += 1
        if block_id in self.free:
            self.free.remove(block_id)

    @invariant()
    def pool_and_index_agree_with_the_model(self):
        assert self.pool.num_free == len(self.free)
        assert all(self.pool.is_free(b) == (b in self.free) for b in self.holders)
        assert len(self.index) == len(self.block_by_key)
        assert all((b in self.index) == (b in self.block_by_key.values()) for b in self.holders)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
