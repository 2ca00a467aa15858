"""Fleets in modelled time: every run with the same seed gives the same figures."""

from dataclasses import replace

import pytest

from services.frontend.engine_client.routing import WEIGHTS
from tests.bench.fleet_model import Fleet, as_one, figures

FLEET = Fleet(
    num_engines=8,
    num_frontends=8,
    groups=1,
    conversations=16,
    streams=4,
    pause_s=4,
    step_s=0.08,
    heartbeat_s=0.5,
)


@pytest.mark.parametrize("groups", [0, 1])
def test_frontends_that_do_not_see_each_other_keep_engines_even_and_caches_warm(groups):
    fleet = replace(FLEET, groups=groups)
    found, whole = figures(fleet, WEIGHTS), figures(as_one(fleet), WEIGHTS)
    assert found.spread < 1.2
    assert found.hit_rate > 0.95 * whole.hit_rate


def test_without_recent_work_engines_are_uneven_where_all_prompts_begin_alike():
    assert figures(replace(FLEET, groups=0), replace(WEIGHTS, balance=0)).spread > 1.5


def test_a_cache_that_holds_less_finds_less():
    small = figures(replace(FLEET, num_engines=1, num_blocks=32), WEIGHTS)
    whole = figures(replace(FLEET, num_engines=1), WEIGHTS)
    assert 0 < small.hit_rate < whole.hit_rate


def test_no_request_waits_while_another_engine_is_idle():
    found = figures(replace(FLEET, num_frontends=1, max_running=3), WEIGHTS)
    assert found.beside_idle < 0.001
