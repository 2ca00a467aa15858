from services.telemetry.counts import LocalCounts


def test_a_count_stops_at_its_limit_and_goes_on_once_something_is_given_back() -> None:
    counts = LocalCounts()

    assert counts.take("places", 2, limit=3)
    assert not counts.take("places", 2, limit=3)
    assert counts.held("places") == 2

    counts.give_back("places", 2)
    assert counts.take("places", 3, limit=3)


def test_names_are_counted_apart() -> None:
    counts = LocalCounts()

    assert counts.take("connections/a", limit=1)
    assert counts.take("connections/b", limit=1)
    assert not counts.take("connections/a", limit=1)


def test_a_count_without_a_limit_is_kept_all_the_same() -> None:
    counts = LocalCounts()

    assert counts.take("bytes", 1000, limit=None)
    assert counts.held("bytes") == 1000


def test_a_name_that_nothing_is_held_under_takes_no_memory() -> None:
    counts = LocalCounts()

    for i in range(100):
        counts.take(f"connections/{i}", limit=1)
        counts.give_back(f"connections/{i}")
        counts.take(f"refused/{i}", limit=0)

    assert not counts._held
