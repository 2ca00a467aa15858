"""The order and the pace at which a session's messages go out."""

import asyncio

import pytest

from protos.engine.v1.engine_pb2 import Admitted, EngineMessage, Heartbeat
from services.engine.errors import SlowReaderError
from services.engine.request import RequestOutput
from services.engine.rpc.outbox import MAX_QUEUED_ANSWERS, Outbox
from tests.support.engine_harness import RecordingSink, engine_config, make_request


class Transport:
    """Takes messages until it is stopped."""

    def __init__(self):
        self.kinds = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def write(self, message):
        await self.is_open.wait()
        self.kinds.append(message.WhichOneof("message"))


def make_outbox(**changes):
    return Outbox(engine_config(**{"heartbeat_interval_ms": 2000, **changes}).serving)


def heartbeat():
    return EngineMessage(heartbeat=Heartbeat())


def admitted():
    return EngineMessage(admitted=Admitted(handle=1))


def output():
    return RequestOutput(make_request(RecordingSink()), [5])


async def test_answers_go_out_before_output():
    transport = Transport()
    outbox = make_outbox()
    outbox.put(output())
    outbox.flush()
    outbox.answer(admitted())
    outbox.close()
    await outbox.send(transport.write, heartbeat)
    assert transport.kinds == ["admitted", "step"]


async def test_closing_sends_what_the_window_held_back():
    transport = Transport()
    outbox = make_outbox(credit_window=1)
    sending = asyncio.create_task(outbox.send(transport.write, heartbeat))
    for _ in range(3):
        outbox.put(output())
        outbox.flush()
        for _ in range(5):
            await asyncio.sleep(0)
    assert transport.kinds.count("step") == 1
    outbox.close()
    await sending
    assert transport.kinds.count("step") == 2


async def test_credit_for_steps_that_were_never_sent_opens_no_window():
    transport = Transport()
    outbox = make_outbox(credit_window=2)
    sending = asyncio.create_task(outbox.send(transport.write, heartbeat))
    outbox.credit(1000)
    for _ in range(4):
        outbox.put(output())
        outbox.flush()
        await asyncio.sleep(0.01)
    assert transport.kinds.count("step") == 2
    outbox.close()
    await sending


async def test_a_write_that_the_transport_does_not_take_is_given_up():
    transport = Transport()
    transport.is_open.clear()
    outbox = make_outbox(slow_reader_timeout_s=0.05)
    outbox.answer(admitted())
    with pytest.raises(SlowReaderError, match=r"unread for 0\.05 s"):
        await outbox.send(transport.write, heartbeat)


async def test_a_write_is_given_up_after_others_were_taken():
    class Stopping(Transport):
        async def write(self, message):
            await super().write(message)
            self.is_open.clear()

    transport, outbox = Stopping(), make_outbox(slow_reader_timeout_s=0.05)
    outbox.answer(admitted())
    outbox.answer(admitted())
    with pytest.raises(SlowReaderError, match=r"unread for 0\.05 s"):
        await outbox.send(transport.write, heartbeat)
    assert len(transport.kinds) == 1


async def test_submissions_wait_while_answers_pile_up():
    transport = Transport()
    outbox = make_outbox()
    for _ in range(MAX_QUEUED_ANSWERS):
        outbox.answer(admitted())
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.close()
    await outbox.send(transport.write, heartbeat)
    await waiting


async def test_output_of_a_frontend_that_was_given_up_is_dropped():
    outbox = make_outbox()
    outbox.fail(SlowReaderError("slow"))
    request = make_request(RecordingSink())
    outbox.put(RequestOutput(request, [1], error=SlowReaderError("slow")))
    assert not outbox.holds_ending_of(request.handle)
