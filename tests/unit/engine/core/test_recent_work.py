"""Tokens that an engine has computed lately."""

import math

from services.engine.core.recent_work import TIME_CONSTANT_S, RecentWork
from services.engine.scheduler.stats import SchedulerCounts


def test_computed_tokens_are_those_that_the_prefix_cache_had_not_and_the_output():
    counts = SchedulerCounts()
    work = RecentWork(counts)
    counts.prompt_tokens, counts.cached_tokens, counts.output_tokens = 100, 60, 5
    assert work.read(1.0) == 45


def test_a_token_counts_less_with_its_age_and_not_twice():
    counts = SchedulerCounts()
    work = RecentWork(counts)
    counts.output_tokens = 1000
    assert work.read(5.0) == 1000
    assert work.read(5.0) == 1000
    assert work.read(5.0 + TIME_CONSTANT_S) == round(1000 / math.e)
    counts.output_tokens += 10
    assert work.read(5.0 + TIME_CONSTANT_S) == round(1000 / math.e) + 10


def test_work_before_the_first_reader_is_forgotten():
    assert RecentWork(SchedulerCounts(output_tokens=1000)).read(1.0) == 0
