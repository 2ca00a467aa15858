"""Tokens that an engine has computed lately."""

import math

import pytest

from services.engine.core.recent_work import TIME_CONSTANT_S, RecentWork
from services.engine.scheduler.stats import SchedulerCounts


def test_computed_tokens_are_those_that_the_prefix_cache_had_not_and_the_output():
    counts = SchedulerCounts()
    work = RecentWork(counts, 1.0)
    counts.prompt_tokens, counts.cached_tokens, counts.output_tokens = 100, 60, 5
    assert work.read(1.0) == 45


def test_a_token_counts_less_with_its_age_and_not_twice():
    counts = SchedulerCounts()
    work = RecentWork(counts, 5.0)
    counts.output_tokens = 1000
    assert work.read(5.0) == 1000
    assert work.read(5.0) == 1000
    assert work.read(5.0 + TIME_CONSTANT_S) == round(1000 / math.e)
    counts.output_tokens += 10
    assert work.read(5.0 + TIME_CONSTANT_S) == round(1000 / math.e) + 10


def test_work_before_the_first_reader_is_forgotten():
    assert RecentWork(SchedulerCounts(output_tokens=1000), 0.0).read(1.0) == 0


def test_a_first_reading_after_an_hour_counts_what_regular_readings_count():
    often, seldom = (SchedulerCounts() for _ in range(2))
    works = [RecentWork(counts, 0.0) for counts in (often, seldom)]
    for second in range(1, 3601):
        often.output_tokens += 100
        now = works[0].read(float(second))
    seldom.output_tokens = often.output_tokens
    assert works[1].read(3600.0) == pytest.approx(now, rel=0.01)
