"""Taps on the step loop."""

from services.engine.batch import (
    BatchDescriptor,
    RowAssignment,
    RowImage,
    pack_int32,
    step_result,
)
from services.engine.core.snapshot import PendingSnapshot
from services.engine.core.watchers import MAX_QUEUED_STEPS, StepWatchers
from services.engine.prompt_image import EncoderImage, PromptImage
from services.engine.scheduler.scheduler import ScheduledStep
from tests.support.requests import make_request


def step(step_id, requests=(), *, samples=True):
    shown = [
        RowImage(offset=each.offset, digest=each.image.digest)
        for request in requests
        for each in request.images
    ]
    assignment = RowAssignment(
        row=0, token_ids=pack_int32([1, 2]), num_prompt_tokens=2, images=shown
    )
    descriptor = BatchDescriptor(step_id=step_id, row_assignments=[assignment])
    step = ScheduledStep(
        step_id=step_id,
        descriptor=descriptor,
        requests=list(requests) if samples else [],
        unsampled=[] if samples else list(requests),
    )
    return step, step_result(step_id, [5])


async def test_a_watcher_sees_steps_in_order_until_the_end():
    watchers = StepWatchers()
    watcher = watchers.add(include_token_ids=True)
    for step_id in (1, 2):
        watchers.publish(*step(step_id))
    watchers.close()
    assert [seen.descriptor.step_id async for seen in watcher] == [1, 2]


async def test_token_ids_are_shown_only_with_permission():
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


async def test_a_recording_has_each_image_of_its_rows_once():
    old, new = (
        EncoderImage(digest=bytes([number]) * 32, patches=b"patches", grid=(2, 2))
        for number in range(2)
    )
    running = make_request(images=placed(old))
    running.row = 1
    watchers = StepWatchers()
    snapshot = PendingSnapshot([running], next_step_id=1, num_in_flight=0)
    recorder = watchers.add(include_token_ids=True, snapshot=snapshot)
    plain, bare = (watchers.add(include_token_ids=include) for include in (True, False))
    watchers.publish(*step(1))
    for step_id, samples in ((2, False), (3, True)):  # a prompt may begin before its last step
        watchers.publish(*step(step_id, [make_request(images=placed(old, new))], samples=samples))
    watchers.close()
    assert [seen.images async for seen in recorder] == [(old,), (new,), ()]
    assert [seen.images async for seen in plain] == [(), (), ()]
    digests = [
        image.digest async for seen in bare for image in seen.descriptor.row_assignments[0].images
    ]
    assert digests == [b""] * 4


def placed(*images):
    return tuple(
        PromptImage(image=image, offset=number, num_tokens=1, num_vectors=1)
        for number, image in enumerate(images)
    )


async def test_a_watcher_that_lags_receives_the_number_of_missed_steps():
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


def running_request():
    request = make_request([1, 2])
    request.row = 3
    request.block_ids = [7]
    request.num_computed_tokens = 2
    return request


async def test_a_tap_with_a_snapshot_sees_the_steps_that_are_scheduled_after_it():
    watchers = StepWatchers()
    request = running_request()
    snapshot = PendingSnapshot([request], next_step_id=3, num_in_flight=2)
    watcher = watchers.add(include_token_ids=True, snapshot=snapshot)
    watchers.publish(*step(1, [request]))
    watchers.publish(*step(2, [make_request([9])]))
    message = await watcher.snapshot()
    assert message.next_step_id == 3
    assert message.rows[0].assignment.token_ids == pack_int32([1, 2, 5])
    watchers.publish(*step(3))
    watchers.close()
    assert [seen.descriptor.step_id async for seen in watcher] == [3]


async def test_a_snapshot_without_steps_in_flight_is_there_at_once():
    watchers = StepWatchers()
    snapshot = PendingSnapshot([], next_step_id=9, num_in_flight=0)
    watcher = watchers.add(include_token_ids=True, snapshot=snapshot)
    assert (await watcher.snapshot()).next_step_id == 9


async def test_a_tap_with_a_snapshot_ends_with_the_worker_and_others_go_on():
    watchers = StepWatchers()
    plain = watchers.add(include_token_ids=True)
    settled, waiting = (
        watchers.add(
            include_token_ids=True,
            snapshot=PendingSnapshot([], next_step_id=1, num_in_flight=num_in_flight),
        )
        for num_in_flight in (0, 1)
    )
    watchers.close_with_snapshot()
    watchers.publish(*step(1))
    assert await waiting.snapshot() is None
    assert [seen async for seen in settled] == []
    watchers.close()
    assert len([seen async for seen in plain]) == 1
