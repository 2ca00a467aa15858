"""Ranks on other hosts as the executor sees them, without a network."""

import asyncio

import pytest

from protos.engine.v1.node_pb2 import NodeMessage, RankCommand, RankEnd, RankEvent
from protos.engine.v1.worker_pb2 import WorkerEvent, WorkerFailure, WorkerProgress
from services.engine.errors import EngineUnavailableError, InvalidRequestError
from services.engine.worker import remote_ranks
from services.engine.worker.rank_process import (
    LostPeerError,
    NodeLostError,
    WorkerDiedError,
    WorkerKilledError,
)
from services.engine.worker.remote_ranks import JoinedNodes, NodeLink, RemoteRank
from tests.support.passing_time import pass_time

PROGRESS = WorkerEvent(progress=WorkerProgress(stage="loading"))


def progress_of(rank):
    return NodeMessage(event=RankEvent(rank=rank, event=PROGRESS.SerializeToString()))


@pytest.fixture
def link():
    return NodeLink(1, "192.0.2.7")


@pytest.fixture
def rank(link):
    rank = RemoteRank(2, 1)
    rank.connect(link)
    return rank


async def test_orders_and_events_travel_in_order(link, rank):
    rank.start(config="{}", meeting_address="192.0.2.1:9")
    rank.send(b"step")
    rank.show_stacks()
    orders = [await link.next_order(60) for _ in range(3)]
    assert orders[0].start.meeting_address == "192.0.2.1:9"
    assert orders[1].command == RankCommand(rank=2, command=b"step")
    assert orders[2].show_stacks.rank == 2
    await link.take(progress_of(2))
    assert await rank.next_event() == PROGRESS


async def test_a_lost_node_ends_its_ranks_after_what_they_said(link, rank):
    await link.take(progress_of(2))
    link.lose("it left")
    assert await rank.next_event() == PROGRESS
    for _ in range(2):
        with pytest.raises(NodeLostError, match=r"node 1 \(192\.0\.2\.7\) was lost: it left"):
            await rank.next_event()
    assert link.is_closed


async def test_no_request_is_suspect_when_a_node_is_lost(link, rank):
    link.lose("it left")
    with pytest.raises(WorkerKilledError):
        await rank.next_event()


@pytest.mark.parametrize(
    ("was_killed", "kind"), [(True, WorkerKilledError), (False, WorkerDiedError)]
)
async def test_the_end_of_a_process_on_a_node_says_how(link, rank, was_killed, kind):
    await link.take(NodeMessage(end=RankEnd(rank=2, error="it ended", was_killed=was_killed)))
    with pytest.raises(WorkerDiedError, match="it ended") as caught:
        await rank.next_event()
    assert caught.type is kind


async def test_a_rank_that_lost_a_peer_is_not_the_cause(link, rank):
    failure = WorkerEvent(failure=WorkerFailure(error="reset", step_id=3, has_lost_peer=True))
    event = RankEvent(rank=2, event=failure.SerializeToString())
    await link.take(NodeMessage(event=event))
    with pytest.raises(LostPeerError, match="rank 2 on node 1 failed in step 3: reset"):
        await rank.next_event()


async def test_an_interruption_wakes_who_waits_and_comes_first(link, rank):
    waiting = asyncio.create_task(rank.next_event())
    await asyncio.sleep(0)
    rank.interrupt(WorkerDiedError("another rank is gone"))
    with pytest.raises(WorkerDiedError, match="another rank"):
        await waiting
    await link.take(progress_of(2))
    with pytest.raises(WorkerDiedError, match="another rank"):
        await rank.next_event()


async def test_an_event_that_cannot_be_parsed_ends_the_rank(link, rank):
    await link.take(NodeMessage(event=RankEvent(rank=2, event=b"\xff\xff")))
    with pytest.raises(WorkerDiedError, match="rank 2 on node 1 does not make sense"):
        await rank.next_event()


@pytest.mark.parametrize("message", [progress_of(3), NodeMessage()])
async def test_messages_that_make_no_sense_are_refused(link, rank, message):
    with pytest.raises(InvalidRequestError):
        await link.take(message)


async def test_a_node_that_takes_no_orders_is_lost_before_they_fill_the_memory(
    link, rank, monkeypatch
):
    monkeypatch.setattr(remote_ranks, "MAX_UNSENT_BYTES", 1000)
    for _ in range(20):
        rank.send(bytes(100))
    with pytest.raises(NodeLostError, match="over 1000 bytes of orders wait"):
        await rank.next_event()
    assert await link.next_order(60) is None


async def test_a_node_waits_while_its_events_are_not_read(link, rank, monkeypatch):
    monkeypatch.setattr(remote_ranks, "MAX_UNREAD_EVENTS", 2)
    for _ in range(2):
        await link.take(progress_of(2))
    third = asyncio.create_task(link.take(progress_of(2)))
    await asyncio.sleep(0)
    assert not third.done()
    await rank.next_event()
    await third


async def test_a_stopped_rank_ends_the_stream_of_its_node(link, rank):
    await rank.stop()
    await rank.stop()
    assert link.is_closed
    assert link.loss is None
    with pytest.raises(WorkerDiedError, match="was stopped"):
        await rank.next_event()


class TestJoinedNodes:
    def test_a_node_gets_the_number_that_it_wants_or_the_first_free_one(self):
        nodes = JoinedNodes(4)
        assert [nodes.admit(each, "").node for each in (2, None, None)] == [2, 1, 3]

    @pytest.mark.parametrize(
        ("number", "kind", "reason"),
        [
            (1, EngineUnavailableError, "node 1 has joined already"),
            (None, EngineUnavailableError, "all 1 nodes beside the head have joined"),
            (2, InvalidRequestError, "there is no node 2: with --num-nodes 2"),
            (0, InvalidRequestError, "there is no node 0"),
        ],
    )
    def test_a_node_too_many_is_refused(self, number, kind, reason):
        nodes = JoinedNodes(2)
        nodes.admit(None, "")
        with pytest.raises(kind, match=reason):
            nodes.admit(number, "")

    async def test_a_start_waits_for_all_nodes_and_names_the_missing_ones(self):
        nodes, stages = JoinedNodes(3), []
        waiting = asyncio.create_task(nodes.wait_for_all(600, stages.append))
        await asyncio.sleep(0)
        second = nodes.admit(2, "")
        await asyncio.sleep(0)
        first = nodes.admit(1, "")
        assert await waiting == [first, second]
        assert stages == ["waiting for node 1, node 2 to join", "waiting for node 1 to join"]

    async def test_nodes_that_do_not_join_in_time_are_named(self, monkeypatch):
        nodes = JoinedNodes(3)
        nodes.admit(1, "")
        waiting = asyncio.create_task(nodes.wait_for_all(600, lambda stage: None))
        await asyncio.sleep(0)
        pass_time(monkeypatch, 600)
        with pytest.raises(WorkerDiedError, match="node 2 did not join within 600 s"):
            await waiting

    async def test_a_link_serves_one_start(self):
        nodes = JoinedNodes(2)
        used = nodes.admit(1, "")
        await nodes.wait_for_all(600, lambda stage: None)
        waiting = asyncio.create_task(nodes.wait_for_all(600, lambda stage: None))
        await asyncio.sleep(0)
        nodes.remove(used)
        new = nodes.admit(1, "")
        assert await waiting == [new]
