import pytest

from services.transport.counts import Counts, LocalCounts, Rate
from services.transport.shared_counts import CountTable, SharedCounts


@pytest.fixture(params=["local", "shared"])
def make_counts(request):
    def make(**clock) -> Counts:
        if request.param == "local":
            return LocalCounts(**clock)
        return SharedCounts(CountTable(3), 1, **clock)

    return make


def test_a_count_stops_at_its_limit_and_goes_on_once_something_is_given_back(make_counts) -> None:
    counts = make_counts()

    assert counts.take("places", 2, limit=3)
    assert not counts.take("places", 2, limit=3)
    assert counts.held("places") == 2

    counts.give_back("places", 2)
    assert counts.take("places", 3, limit=3)


def test_names_are_counted_apart(make_counts) -> None:
    counts = make_counts()

    assert counts.take("connections/a", limit=1)
    assert counts.take("connections/b", limit=1)
    assert not counts.take("connections/a", limit=1)


def test_a_count_without_a_limit_is_kept_all_the_same(make_counts) -> None:
    counts = make_counts()

    assert counts.take("bytes", 1000, limit=None)
    assert counts.held("bytes") == 1000


def test_a_name_that_nothing_is_held_under_takes_no_memory() -> None:
    counts = LocalCounts()

    for i in range(100):
        counts.take(f"connections/{i}", limit=1)
        counts.give_back(f"connections/{i}")
        counts.take(f"refused/{i}", limit=0)

    assert not counts._held


SIXTY = Rate(per_s=1, capacity=60)


def test_a_bucket_starts_full_and_gains_tokens_up_to_its_capacity(make_counts) -> None:
    now_s = 0.0
    counts = make_counts(clock=lambda: now_s)

    assert counts.draw("tokens", 60, rate=SIXTY, needs=60) == 0
    assert counts.draw("tokens", 1, rate=SIXTY, needs=1) == 1
    now_s = 30.0
    assert counts.draw("tokens", 30, rate=SIXTY, needs=31) == 1
    assert counts.draw("tokens", 30, rate=SIXTY, needs=30) == 0
    now_s = 1000.0
    assert counts.draw("tokens", 0, rate=SIXTY, needs=61) == 1


def test_a_bucket_may_be_overdrawn_and_tokens_put_back(make_counts) -> None:
    counts = make_counts(clock=lambda: 0.0)

    assert counts.draw("tokens", 100, rate=SIXTY, needs=None) == 0
    assert counts.draw("tokens", 0, rate=SIXTY, needs=1) == 41
    assert counts.draw("tokens", -200, rate=SIXTY, needs=None) == 0
    assert counts.draw("tokens", 0, rate=SIXTY, needs=61) == 1


def test_buckets_that_are_full_again_take_no_memory() -> None:
    now_s = 0.0
    counts = LocalCounts(clock=lambda: now_s)

    for i in range(5000):
        now_s += 1
        counts.draw(f"tokens/{i}", 1, rate=SIXTY, needs=1)

    assert len(counts._buckets) <= 1024
