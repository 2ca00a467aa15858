"""The number of drafts, chosen from times and acceptance that are made up."""

import numpy as np
import pytest

from services.engine.spec_decode.draft_length import (
    MAX_COST_AGE,
    DraftLength,
    lengths_between,
)


class Serving:
    """Steps of R requests whose times and accepted drafts follow a rule."""

    def __init__(self, cost_us, num_accepted, lengths=(0, 1, 2, 3)):
        self.policy = DraftLength(lengths)
        self.cost_us, self.num_accepted = cost_us, num_accepted
        self.chosen = []

    def run(self, num_steps, num_requests=1):
        verified = 0
        for _ in range(num_steps):
            made = self.policy.choose(num_requests, most=self.policy.lengths[-1])
            drafts = np.full(num_requests, verified, np.int32)
            accepted = np.minimum(drafts, self.num_accepted(len(self.chosen)))
            self.policy.observe_drafts(drafts, accepted.astype(np.int32))
            if made == verified:
                self.policy.observe_cost(num_requests, made, self.cost_us(num_requests, made))
            self.chosen.append(made)
            verified = made
        return self

    def share(self, length, last=100):
        return sum(each == length for each in self.chosen[-last:]) / last


def flat(num_requests, length):
    """Steps that wait for weights: a draft costs little."""
    return 1000 + 60 * length * num_requests


def steep(num_requests, length):
    """Steps that compute: each draft costs as much as a token."""
    return 1000 * (1 + length)


def test_all_drafts_are_made_where_they_hold_and_cost_little():
    assert Serving(flat, lambda step: 3).run(300).share(3) > 0.9


def test_none_is_made_where_drafts_cost_as_much_as_tokens():
    assert Serving(steep, lambda step: step % 2 * 3).run(600).share(0) > 0.8


def test_none_is_made_where_none_holds():
    assert Serving(flat, lambda step: 0).run(600).share(0) > 0.8


def test_the_first_is_made_alone_where_only_the_first_holds():
    serving = Serving(lambda size, length: 1000 + 200 * length, lambda step: 1).run(600)
    assert serving.share(1) > 0.8


def test_drafts_begin_again_once_they_hold_again():
    serving = Serving(flat, lambda step: 0 if step < 500 else 3).run(500)
    assert serving.share(0) > 0.8
    assert serving.run(700).share(3) > 0.8


def test_each_size_of_batch_has_its_own_number():
    serving = Serving(flat, lambda step: step % 3)
    serving.run(300, num_requests=1)
    few = serving.chosen[-100:]
    serving.run(300, num_requests=64)
    many = serving.chosen[-100:]
    assert sum(few) > 150
    assert sum(many) < 50


def test_a_cost_is_measured_again_after_a_while():
    slow_at_first = {3: 50_000}
    serving = Serving(lambda size, length: slow_at_first.get(length, 1000), lambda step: 3)
    assert serving.run(100).share(3, last=50) == 0
    slow_at_first.clear()
    assert serving.run(2 * MAX_COST_AGE).share(3) > 0.9


def test_one_slow_step_changes_nothing():
    def cost(size, length):
        times.append(0)
        return 500_000 if len(times) == 150 else flat(size, length)

    times = []
    assert Serving(cost, lambda step: 3).run(200).share(3) > 0.8


@pytest.mark.parametrize(
    ("fewest", "most", "lengths"),
    [(0, 3, (0, 1, 2, 3)), (0, 8, (0, 1, 2, 4, 8)), (2, 2, (2,)), (1, 5, (1, 2, 4, 5))],
)
def test_the_bounds_are_among_the_numbers(fewest, most, lengths):
    assert lengths_between(fewest, most) == lengths
    served = Serving(flat, lambda step: step % 4, lengths).run(50)
    assert set(served.chosen) <= set(lengths)
