"""Requests of all kinds of calls leave nothing for the garbage collector."""

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.rpc import session as session_module
from services.frontend.rpc.session import _LiveRequest
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.no_collector import collector_off, num_alive
from tests.support.waiting import until
from tests.unit.frontend.rpc.test_session import Answers, generate, session

# No messages: the test's own client has objects of these classes too, and cycles of them.
KINDS = (Generation, RequestRecord, ResponseWriter, _LiveRequest)
ROUNDS = 3


async def refuse(stack):
    with pytest.raises(grpc.aio.AioRpcError):
        await stack.stub.Generate(pb.GenerateRequest(text="")).read()


async def leave(stack):
    stack.engine.pause()
    call = stack.stub.Generate(pb.GenerateRequest(text="one two"))
    await until(lambda: stack.engine.live)
    call.cancel()
    await until(lambda: not stack.engine.live)
    stack.engine.resume()


async def share_a_session(stack):
    call = stack.stub.Session()
    for handle in (1, 2):
        await call.write(generate(handle))
    await call.write(generate(3, ""))
    await Answers(call).read_until_over(1, 2, 3)
    await call.done_writing()
    await call.read()


async def leave_a_session(stack):
    stack.engine.pause()
    call = stack.stub.Session()
    for handle in (1, 2):
        await call.write(generate(handle))
    await until(lambda: len(stack.engine.live) == 2)
    call.cancel()
    await until(lambda: not stack.engine.live)
    stack.engine.resume()


async def use_http(stack):
    async with stack.http_client() as client:
        for body in ({"prompt": "one"}, {"prompt": ""}, {"prompt": "one", "unknown": 1}):
            await client.post("/v1/completions", json=body)


@pytest.mark.parametrize("end", [refuse, leave, share_a_session, leave_a_session, use_http])
async def test_requests_leave_nothing_for_the_collector(end):
    async with FakeEngine() as engine, frontend_stack(engine, http_port=0) as stack:
        await end(stack)
        with collector_off():
            before = num_alive(*KINDS)
            for _ in range(ROUNDS):
                await end(stack)
            await until(lambda: all(n <= before.get(k, 0) for k, n in num_alive(*KINDS).items()))


async def test_whatever_reading_a_request_raises_ends_that_request_alone(monkeypatch):
    async with session(FakeEngine()) as (stack, call, answers):
        stack.engine.pause()
        await call.write(generate(1))
        await until(lambda: stack.engine.live)
        with monkeypatch.context() as context:
            context.setattr(session_module, "options_of", lambda _: 1 / 0)
            await call.write(generate(2))
            await answers.read_until_over(2)
        with monkeypatch.context() as context:
            context.setattr(stack.server._pipeline, "start", lambda *_, **__: 1 / 0)
            await call.write(generate(3))
            await answers.read_until_over(3)
        for failure in answers.failure.values():
            assert failure.code == grpc.StatusCode.INTERNAL.value[0]
            assert "internal error" in failure.message
        stack.engine.resume()
        await answers.read_until_over(1)
        assert answers.text[1] == "hello world"
