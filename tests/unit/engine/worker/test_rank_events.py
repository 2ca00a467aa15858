"""Events of several ranks, without processes."""

import pytest

from protos.engine.v1.worker_pb2 import WorkerEvent, WorkerFailure, WorkerProgress
from services.engine.batch import StepResult
from services.engine.worker import rank_events
from services.engine.worker.rank_events import RankEvents
from services.engine.worker.rank_process import LostPeerError, NodeLostError, WorkerDiedError
from services.engine.worker.remote_ranks import RemoteRank
from tests.support.waiting import until

PROGRESS = WorkerEvent(progress=WorkerProgress(stage="loading"))
LOST_PEER = WorkerEvent(failure=WorkerFailure(error="connection closed", has_lost_peer=True))


@pytest.fixture
def ranks():
    return [RemoteRank(number, 0) for number in range(3)]


@pytest.fixture
def aside():
    """Ranks and kinds of the events that `next_event` does not return."""
    return []


@pytest.fixture
def listen(ranks, aside):
    """Listens to the ranks; those given send results."""
    opened = []

    def open_events(*reporters):
        events = RankEvents(
            ranks, reporters, lambda number, event: aside.append((number, kind_of(event)))
        )
        events.open()
        opened.append(events)
        return events

    yield open_events
    for events in opened:
        events.close()


def kind_of(event):
    return event.WhichOneof("event")


def result_of(step_id, elapsed_us=0):
    return WorkerEvent(result=StepResult(step_id=step_id, elapsed_us=elapsed_us))


async def say(rank, event):
    await rank.put(event.SerializeToString())


async def test_the_reporters_events_come_in_order_and_the_others_aside(ranks, aside, listen):
    events = listen(1)
    await say(ranks[2], PROGRESS)
    await say(ranks[1], result_of(1))
    await say(ranks[1], PROGRESS)
    await say(ranks[0], result_of(1))
    assert await events.next_event() == result_of(1)
    assert await events.next_event() == PROGRESS
    await until(lambda: len(aside) == 2)
    assert sorted(aside) == [(0, "result"), (2, "progress")]


async def test_results_of_data_parallel_ranks_come_together(ranks, aside, listen):
    events = listen(0, 2)
    for step_id in (1, 2):
        await say(ranks[0], result_of(step_id, elapsed_us=10))
    await say(ranks[0], PROGRESS)
    assert await events.next_event() == PROGRESS
    for step_id in (1, 2):
        await say(ranks[2], result_of(step_id, elapsed_us=20))
        joined = (await events.next_event()).result
        assert (joined.step_id, joined.elapsed_us) == (step_id, 10)
        assert [each.elapsed_us for each in joined.across_dp] == [20]
    assert sorted(aside) == [(0, "result")] * 2 + [(2, "result")] * 2


@pytest.mark.parametrize("reporters", [(0,), (0, 2)])
async def test_the_end_of_another_rank_ends_the_reporters_events(ranks, listen, reporters):
    events = listen(*reporters)
    ranks[1].end(NodeLostError("node 1 was lost"))
    with pytest.raises(NodeLostError, match="node 1 was lost"):
        await events.next_event()


async def test_the_end_of_a_rank_explains_that_the_reporter_lost_it(ranks, listen):
    events = listen(0)
    await say(ranks[0], LOST_PEER)
    await say(ranks[1], LOST_PEER)
    ranks[2].end(WorkerDiedError("rank 2 exited with code 3"))
    with pytest.raises(WorkerDiedError, match="rank 2 exited with code 3"):
        await events.next_event()


async def test_a_lost_rank_without_a_cause_is_said_in_the_end(ranks, listen, monkeypatch):
    monkeypatch.setattr(rank_events, "CAUSE_GRACE_S", 0.0)
    events = listen(0)
    await say(ranks[1], LOST_PEER)
    with pytest.raises(LostPeerError, match=r"^rank 1 .*: connection closed"):
        await events.next_event()


async def test_closed_events_may_be_closed_and_opened_again(ranks, listen):
    events = listen(0, 2)
    await say(ranks[0], result_of(1))
    events.close()
    events.close()
    events.open()
    await say(ranks[0], result_of(1))
    await say(ranks[2], result_of(1))
    assert (await events.next_event()).result.step_id == 1
