"""Buckets: where an observation falls."""

from services.telemetry.histogram import LATENCY_BOUNDS_S, TOKEN_BOUNDS, Histogram


def test_a_bound_belongs_to_the_bucket_below_it():
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 7.5


def test_equal_observations_are_counted_at_once():
    histogram = Histogram([1.0])
    histogram.observe(0.5, 1000)
    assert histogram.counts == [1000, 0]
    assert histogram.sum == 500


def test_the_bounds_in_use_ascend():
    for bounds in (LATENCY_BOUNDS_S, TOKEN_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
