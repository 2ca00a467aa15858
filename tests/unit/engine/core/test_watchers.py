"""Taps on the step loop."""

from services.engine.batch import BatchDescriptor, RowAssignment, pack_int32, step_result
from services.engine.core.watchers import MAX_QUEUED_STEPS, StepWatchers


def step(step_id):
    assignment = RowAssignment(row=0, token_ids=pack_int32([1, 2]), num_prompt_tokens=2)
    return BatchDescriptor(step_id=step_id, row_assignments=[assignment]), step_result(step_id, [5])


async def test_a_watcher_sees_steps_in_order_until_the_end():
    watchers = StepWatchers()
    watcher = watchers.add(include_token_ids=True)
    for step_id in (1, 2):
        watchers.publish(*step(step_id))
    watchers.close()
    assert [seen.descriptor.step_id async for seen in watcher] == [1, 2]


async def test_token_ids_are_shown_only_to_those_who_may_see_them():
    watchers = StepWatchers()
    full, bare = (watchers.add(include_token_ids=include) for include in (True, False))
    watchers.publish(*step(1))
    watchers.close()
    (seen,) = [seen async for seen in full]
    assert seen.result.token_ids
    assert seen.descriptor.row_assignments[0].token_ids
    (seen,) = [seen async for seen in bare]
    assert not seen.result.token_ids
    assert not seen.descriptor.row_assignments[0].token_ids


async def test_a_watcher_that_lags_is_told_how_many_steps_it_missed():
    watchers = StepWatchers()
    watcher = watchers.add(include_token_ids=True)
    for step_id in range(MAX_QUEUED_STEPS + 3):
        watchers.publish(*step(step_id))
    steps = aiter(watcher)
    assert (await anext(steps)).num_missed == 0
    watchers.publish(*step(1000))
    watchers.close()
    rest = [seen async for seen in steps]
    assert (rest[-1].descriptor.step_id, rest[-1].num_missed) == (1000, 3)


async def test_a_watcher_that_left_gets_nothing_more():
    watchers = StepWatchers()
    watcher = watchers.add(include_token_ids=True)
    watchers.remove(watcher)
    watchers.publish(*step(1))
    watcher.close()
    assert [seen async for seen in watcher] == []
