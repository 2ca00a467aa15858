"""A frontend's view of an engine between two heartbeats."""

import numpy as np

from protos.engine.v1.engine_pb2 import Heartbeat, KnownAdapter, PrefixChanges
from services.frontend.engine_client.engine_view import (
    STALLED_STEP_MS,
    AdapterChange,
    EngineView,
)


def beat(*, added=(), removed=(), reset=False, **fields: int) -> Heartbeat:
    changes = PrefixChanges(
        reset=reset,
        added=np.array(added, "<u8").tobytes(),
        removed=np.array(removed, "<u8").tobytes(),
    )
    return Heartbeat(prefixes=changes, **fields)


def test_prefixes_are_counted_up_to_the_first_that_is_missing():
    view = EngineView()
    view.take(beat(added=[1, 2, 4]))
    assert view.count_cached([1, 2, 3, 4]) == 2


def test_what_was_overwritten_is_forgotten():
    view = EngineView()
    view.take(beat(added=[1, 2]))
    view.take(beat(removed=[2]))
    assert view.count_cached([1, 2]) == 1


def test_a_reset_forgets_all():
    view = EngineView()
    view.take(beat(added=[1, 2]))
    view.take(beat(added=[3], reset=True))
    assert (view.count_cached([1]), view.count_cached([3])) == (0, 1)
    assert view.num_known_prefixes == 1


def test_a_request_just_sent_counts_as_cached_until_the_engine_must_have_said_so():
    view = EngineView()
    view.expect([1, 2], num_blocks=2)
    assert view.count_cached([1, 2]) == 2
    view.take(beat())
    assert view.count_cached([1, 2]) == 2
    view.take(beat())
    assert view.count_cached([1, 2]) == 0


def test_queued_is_an_estimate_of_waiting_requests_and_what_was_sent_since():
    view = EngineView()
    view.take(beat(num_used_blocks=40, num_running=4, num_waiting=3))
    view.expect([], num_blocks=5)
    assert (view.num_held_blocks, view.num_queued_blocks) == (40, 3 * 10 + 5)
    view.take(beat(num_used_blocks=50, num_running=5))
    assert (view.num_held_blocks, view.num_queued_blocks) == (50, 0)


def test_a_request_that_waits_at_an_idle_engine_is_at_least_a_block():
    view = EngineView()
    view.take(beat(num_waiting=3))
    assert view.num_queued_blocks == 3


def test_a_step_that_takes_long_makes_an_engine_suspect():
    view = EngineView()
    view.take(beat(step_age_ms=STALLED_STEP_MS + 1))
    assert view.is_stalled
    view.take(beat(step_age_ms=10))
    assert not view.is_stalled


def test_an_engine_that_does_not_say_what_it_computed_is_not_an_idle_one():
    view = EngineView()
    assert view.num_recent_tokens is None
    view.take(beat())
    assert view.num_recent_tokens is None
    view.take(beat(num_recent_tokens=0))
    assert view.num_recent_tokens == 0


def test_a_list_of_adapters_from_before_an_operators_change_is_not_taken():
    def listing(num_changes, *names):
        known = {"num_changes": num_changes, "adapters": [{"name": each} for each in names]}
        return Heartbeat(adapters=known)

    view = EngineView()
    view.take(listing(1, "a"))
    view.note(AdapterChange("b", KnownAdapter(name="b"), 3))
    view.take(listing(2, "a", "c"))
    assert set(view.adapters) == {"a", "b", "c"}
    view.take(listing(3, "a", "b", "c"))
    assert set(view.adapters) == {"a", "b", "c"}
    view.note(AdapterChange("c", None, 4))
    view.take(listing(3, "a", "b", "c"))
    assert set(view.adapters) == {"a", "b"}
    view.take(listing(5, "a"))
    view.note(AdapterChange("b", KnownAdapter(name="b"), 3))
    assert set(view.adapters) == {"a"}


def test_answers_to_operators_may_come_in_any_order():
    view = EngineView()
    view.note(AdapterChange("b", KnownAdapter(name="b"), 2))
    view.note(AdapterChange("a", KnownAdapter(name="a"), 1))
    assert set(view.adapters) == {"a", "b"}
    view.note(AdapterChange("c", None, 4))
    view.note(AdapterChange("c", KnownAdapter(name="c"), 3))
    assert set(view.adapters) == {"a", "b"}


def test_the_answers_of_engines_that_count_no_changes_hold_until_the_next_list():
    view = EngineView()
    view.note(AdapterChange("a", KnownAdapter(name="a"), 0))
    view.note(AdapterChange("b", KnownAdapter(name="b"), 0))
    view.note(AdapterChange("b", None, 0))
    assert set(view.adapters) == {"a"}
    view.take(Heartbeat(adapters={"adapters": [{"name": "c"}]}))
    assert set(view.adapters) == {"c"}
