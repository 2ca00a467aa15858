"""Planned capture sizes are the best there are, against every other choice on small cases."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.capture_sizes.planner import (
    Fit,
    GraphMemory,
    plan_sizes,
    plan_within,
)

SIZES = st.integers(1, 12)
HISTOGRAMS = st.dictionaries(SIZES, st.integers(0, 9), max_size=8)


def choices(largest_size):
    sizes = range(1, largest_size + 1)
    return (chosen for n in range(largest_size + 1) for chosen in combinations(sizes, n))


def badness(counts, sizes):
    """Returns the quantity to minimise: missed steps first, padded tokens next."""
    result = Fit.of(counts, sizes)
    return result.num_steps - result.num_hits, result.num_padded


@given(counts=HISTOGRAMS, num_graphs=st.integers(1, 6))
def test_no_choice_of_as_many_sizes_pads_less(counts, num_graphs):
    planned = plan_sizes(counts, num_graphs=num_graphs)
    assert len(planned) <= num_graphs
    assert list(planned) == sorted(set(planned))
    best = min(badness(counts, sizes) for sizes in choices(12) if len(sizes) <= num_graphs)
    assert badness(counts, planned) == best
    assert best[0] == 0


@given(counts=HISTOGRAMS, num_graphs=st.integers(1, 4), reach=SIZES)
def test_no_choice_that_reaches_as_far_pads_less(counts, num_graphs, reach):
    planned = plan_sizes(counts, num_graphs=num_graphs, reach=reach)
    assert planned[-1] >= reach
    far = (sizes for sizes in choices(12) if sizes and sizes[-1] >= reach)
    best = min(badness(counts, sizes) for sizes in far if len(sizes) <= num_graphs)
    assert badness(counts, planned) == best


@given(
    counts=HISTOGRAMS,
    memory=st.builds(
        GraphMemory,
        pool_bytes=st.integers(0, 30),
        pool_size=st.integers(1, 12),
        bytes_per_graph=st.integers(0, 6),
    ),
    num_bytes=st.integers(0, 40),
)
def test_no_choice_within_a_budget_misses_less_or_pads_less(counts, memory, num_bytes):
    def fits(sizes):
        return not sizes or memory.of(largest=max(sizes), num_graphs=len(sizes)) <= num_bytes

    planned = plan_within(counts, num_bytes=num_bytes, memory=memory)
    assert fits(planned)
    best = min(badness(counts, sizes) for sizes in choices(12) if fits(sizes))
    assert badness(counts, planned) == best


def test_a_worked_case():
    counts = {1: 100, 3: 60, 4: 10, 7: 40}
    # 3 and 7: 100 steps pad 2, 10 pad 3. 1 and 7: 60 pad 4, 10 pad 3. 4 and 7: 100 pad 3, 60 pad 1.
    assert plan_sizes(counts, num_graphs=2) == (3, 7)
    assert Fit.of(counts, (3, 7)).num_padded == 230
    assert plan_sizes(counts, num_graphs=3) == (1, 3, 7)
    assert plan_sizes(counts, num_graphs=9) == (1, 3, 4, 7)
    figures = Fit.of(counts, (1, 4))
    assert (figures.num_steps, figures.num_hits) == (210, 170)
    assert (figures.num_computed, figures.num_padded) == (100 + 4 * 70, 60)
    assert figures.hit_rate == 170 / 210


def test_nothing_observed_is_served_by_nothing_or_by_what_must_be_reached():
    assert plan_sizes({}, num_graphs=3) == ()
    assert plan_sizes({}, num_graphs=3, reach=8) == (8,)
    assert plan_within({5: 1}, num_bytes=0, memory=GraphMemory.from_measured({8: 1})) == ()
    empty = Fit.of({}, ())
    assert (empty.hit_rate, empty.padding) == (1.0, 0.0)


def test_a_plan_of_no_graphs_is_refused():
    with pytest.raises(ValueError, match="num_graphs is 0"):
        plan_sizes({1: 1}, num_graphs=0)


def test_thousands_of_sizes_are_planned_exactly_too():
    generator = np.random.default_rng(7)
    counts = dict(enumerate(generator.integers(1, 10**6, 8192).tolist(), start=1))
    planned = plan_sizes(counts, num_graphs=51)
    assert (len(planned), planned[-1]) == (51, 8192)
    padded = Fit.of(counts, planned).num_padded
    for index in range(50):
        for moved in (planned[index] - 1, planned[index] + 1):
            other = sorted({*planned[:index], moved, *planned[index + 1 :]} - {0})
            assert Fit.of(counts, other).num_padded >= padded


def test_memory_is_a_pool_of_the_largest_and_so_much_for_each_other():
    memory = GraphMemory.from_measured({64: 66, 32: 2, 16: 2})
    assert memory == GraphMemory(pool_bytes=64, pool_size=64, bytes_per_graph=2)
    assert memory.of(largest=64, num_graphs=3) == 70
    assert memory.of(largest=32, num_graphs=1) == 34
    assert GraphMemory.from_measured({64: 0, 32: 0}) is None
    assert GraphMemory.from_measured({}) is None
