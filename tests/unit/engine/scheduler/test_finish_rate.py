"""How soon a refused caller should try again."""

from services.engine.scheduler.holdings import FinishRate


def test_retry_after_is_the_mean_time_between_recent_endings():
    rate = FinishRate()
    for now_s in (10.0, 10.2, 10.4, 10.6):
        rate.record(now_s)
    assert rate.retry_after_ms(10.8) == 200


def test_retry_after_grows_while_nothing_ends():
    rate = FinishRate()
    rate.record(10.0)
    assert rate.retry_after_ms(12.0) == 2000


def test_retry_after_stays_within_its_bounds():
    rate = FinishRate()
    rate.record(10.0)
    assert rate.retry_after_ms(10.0) == 50
    assert rate.retry_after_ms(1000.0) == 5000


def test_without_any_ending_a_second_is_suggested():
    assert FinishRate().retry_after_ms(10.0) == 1000
