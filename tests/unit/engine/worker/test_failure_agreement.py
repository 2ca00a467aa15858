"""Agreement of ranks on steps that ran out of memory, without processes."""

import asyncio

import pytest

from protos.engine.v1.worker_pb2 import WorkerEvent, WorkerProgress
from services.engine.batch import StepFailure, StepResult
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.failure_agreement import AGREEMENT_GRACE_S, FailureAgreement
from services.engine.worker.placement import rank_places
from services.engine.worker.rank_process import WorkerDiedError
from services.engine.worker.remote_ranks import RemoteRank
from tests.support.passing_time import pass_time

OUT_OF_MEMORY = StepFailure.STEP_FAILURE_OUT_OF_MEMORY
PROGRESS = WorkerEvent(progress=WorkerProgress(stage="loading"))


def agreement_of(**sizes):
    """Returns an agreement of ranks that are not started, and the ranks."""
    config = EngineConfig.from_flags(**sizes)
    ranks = [RemoteRank(place.rank, 0) for place in rank_places(config.parallel)]
    return FailureAgreement(config, ranks), ranks


def failed(step_id=7, num_collectives=3):
    return StepResult(step_id=step_id, failure=OUT_OF_MEMORY, num_collectives=num_collectives)


def alone(rank, step_id=7):
    """Expects the error of a rank that failed in a step as the only one."""
    return pytest.raises(
        WorkerDiedError, match=f"^rank {rank} .*out of memory in step {step_id} where other ranks"
    )


async def pass_limit(monkeypatch):
    """Lets the time pass in which all ranks must fail."""
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        pass_time(patch, AGREEMENT_GRACE_S)
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_step_that_succeeds_is_settled_at_once():
    agreement, _ = agreement_of(tensor_parallel_size=2)
    await agreement.settle(StepResult(step_id=1))


async def test_ranks_that_all_fail_at_the_same_place_go_on(monkeypatch):
    agreement, ranks = agreement_of(tensor_parallel_size=3)
    for step_id in (7, 9):
        agreement.note(1, failed(step_id))
        settling = asyncio.create_task(agreement.settle(failed(step_id)))
        await asyncio.sleep(0)
        assert not settling.done()
        agreement.note(2, failed(step_id))
        await settling
    await pass_limit(monkeypatch)
    await ranks[0].put(PROGRESS.SerializeToString())
    assert await ranks[0].next_event() == PROGRESS


async def test_a_reporter_that_fails_alone_is_named(monkeypatch):
    agreement, _ = agreement_of(tensor_parallel_size=2)
    settling = asyncio.create_task(agreement.settle(failed()))
    await pass_limit(monkeypatch)
    with alone(0):
        await settling


async def test_another_rank_that_fails_alone_ends_the_reporters_events(monkeypatch):
    agreement, ranks = agreement_of(tensor_parallel_size=2)
    agreement.note(1, failed())
    await pass_limit(monkeypatch)
    with alone(1):
        await ranks[0].next_event()


@pytest.mark.parametrize("other", [{"step_id": 8}, {"num_collectives": 4}])
async def test_ranks_that_fail_at_different_places_do_not_go_on(other):
    agreement, _ = agreement_of(tensor_parallel_size=2)
    agreement.note(1, failed(**other))
    with alone(1, other.get("step_id", 7)):
        await agreement.settle(failed())


async def test_a_stage_is_not_waited_for_since_others_wait_for_it():
    agreement, ranks = agreement_of(pipeline_parallel_size=2)
    with alone(1):  # the reporter, in the last stage
        await agreement.settle(failed())
    agreement.note(0, failed(8))
    with alone(0, 8):
        await ranks[1].next_event()


@pytest.mark.parametrize("number", [0, 1])
async def test_a_data_parallel_rank_that_fails_where_another_succeeds_is_named(number):
    agreement, _ = agreement_of(data_parallel_size=2)
    result, other = failed(), StepResult(step_id=7)
    if number:
        result, other = other, result
    result.across_dp.append(other)
    with alone(number):
        await agreement.settle(result)


async def test_failures_of_ranks_that_have_ended_are_forgotten(monkeypatch):
    agreement, ranks = agreement_of(tensor_parallel_size=2)
    agreement.note(1, failed())
    agreement.clear()
    await pass_limit(monkeypatch)
    await ranks[0].put(PROGRESS.SerializeToString())
    assert await ranks[0].next_event() == PROGRESS
