"""Blocks are loaded where that is no slower than computing their tokens."""

import pytest

from services.engine.kv_cache.recompute_rule import RecomputeRule


def test_before_a_prompt_was_computed_everything_is_loaded():
    rule = RecomputeRule(block_load_s=100.0)
    assert rule.pays(1000, 1)
    assert rule.compute_s(1) is None


def test_measured_times_decide():
    rule = RecomputeRule(block_load_s=0.001)
    rule.observe_prompts(1000, 100_000)  # 0.1 ms a token
    assert rule.compute_s(10) == pytest.approx(0.001)
    assert rule.pays(1, 16)
    assert not rule.pays(1, 9)
    assert not rule.pays(2, 16)


def test_reads_count_once_they_are_measured():
    rule = RecomputeRule(block_load_s=0.001)
    rule.observe_prompts(1000, 100_000)
    assert rule.pays(1, 16, num_reads=1)
    rule.observe_reads(4, 4000)
    assert not rule.pays(1, 16, num_reads=1)
    assert rule.pays(1, 21, num_reads=1)


def test_later_steps_count_more():
    rule = RecomputeRule(block_load_s=0.001)
    rule.observe_prompts(100, 1_000_000)
    for _ in range(100):
        rule.observe_prompts(100, 1000)
    assert not rule.pays(1, 16)
