"""Requests give back what they hold when they end, whichever way, and without the collector."""

import asyncio

import grpc
import pytest

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput
from protos.engine.v1.engine_pb2 import Abort, GenerateRequest
from services.engine.edge.call import GenerateCall
from services.engine.grammar.compiler import LIVE
from services.engine.grammar.constraint import GrammarConstraint
from services.engine.grammar.probe_pool import ProbePool
from services.engine.request import Request
from services.engine.rpc.session import Session
from tests.support.no_collector import collector_off, num_alive
from tests.support.waiting import until
from tests.unit.engine.edge.test_structured_output import HOSTILE, tiny_service
from tests.unit.engine.rpc.test_session import Frontend

SHORT = StructuredOutput(regex="[a-z]{2}")
LONG = StructuredOutput(regex="[a-z]{400}")
SLOW = StructuredOutput(json_schema=HOSTILE)
KINDS = (Request, GrammarConstraint, Session, GenerateCall)
ROUNDS = 3


def counts(service):
    return service.server._grammars._counts


def sampling(wanted, **fields):
    return SamplingParams(seed=1, max_tokens=400, structured_output=wanted, **fields)


async def finish(service):
    call = service.stub.Generate(
        GenerateRequest(prompt_token_ids=[5, 6], sampling=sampling(SHORT, logprobs=1))
    )
    assert [message async for message in call]


async def leave(service):
    call = service.stub.Generate(GenerateRequest(prompt_token_ids=[5, 6], sampling=sampling(LONG)))
    await call.read()
    call.cancel()
    await until(lambda: not len(service.core.requests))


async def leave_while_compiling(service):
    call = service.stub.Generate(GenerateRequest(prompt_token_ids=[5], sampling=sampling(SLOW)))
    await until(lambda: counts(service).held(LIVE))
    call.cancel()
    await until(lambda: not counts(service).held(LIVE))


async def be_refused(service):
    for wrong in (
        {"structured_output": StructuredOutput(regex="(")},
        {"structured_output": SHORT, "ignore_eos": True},
    ):
        message = GenerateRequest(prompt_token_ids=[5], sampling=SamplingParams(**wrong))
        with pytest.raises(grpc.aio.AioRpcError):
            await service.stub.Generate(message).read()


async def be_refused_by_the_core(service):
    first = await Frontend(service.stub).open()
    await first.submit(1, max_tokens=400, sampling={"structured_output": LONG})
    await first.submit(2, request_id="r1", sampling={"structured_output": LONG})
    await first.read_until(lambda f: 2 in f.rejected)
    await first.send(abort=Abort(handles=[1]))
    await first.read_until(lambda f: 1 in f.finished)
    await first.call.done_writing()
    with pytest.raises(EOFError):
        await first.read_until(lambda f: False)


async def lose_the_session(service):
    frontend = await Frontend(service.stub).open()
    await frontend.submit(1, max_tokens=400, sampling={"structured_output": LONG})
    await frontend.submit(2, sampling={"structured_output": SLOW})
    await frontend.submit(3, sampling={"structured_output": SHORT})
    await frontend.read_until(lambda f: 3 in f.finished and 1 in f.tokens)
    frontend.call.cancel()
    await until(lambda: not len(service.core.requests))


async def break_the_protocol(service):
    frontend = await Frontend(service.stub).open()
    await frontend.submit(1, max_tokens=400, sampling={"structured_output": LONG})
    await frontend.read_until(lambda f: 1 in f.tokens)
    await frontend.send()
    with pytest.raises(grpc.aio.AioRpcError):
        await frontend.read_until(lambda f: False)


async def lose_the_worker(service):
    frontend = await Frontend(service.stub).open()
    await frontend.submit(1, max_tokens=400, sampling={"structured_output": LONG})
    await frontend.read_until(lambda f: 1 in f.tokens)
    num_restarts = service.core.counters.num_worker_restarts
    service.executors.last.die()
    await frontend.send(abort=Abort(handles=[1]))
    await frontend.read_until(lambda f: 1 in f.finished)
    frontend.call.cancel()
    await until(lambda: service.core.counters.num_worker_restarts > num_restarts)
    await until(lambda: service.core.is_ready)


@pytest.fixture(autouse=True)
def slow_grammar(monkeypatch):
    """Lets the one grammar compile until its request leaves, without a process."""
    check = ProbePool.check

    async def wait_for_ever(self, wanted):
        if wanted.texts == (HOSTILE,):
            await asyncio.Event().wait()
        return await check(self, wanted)

    monkeypatch.setattr(ProbePool, "check", wait_for_ever)


@pytest.mark.parametrize(
    "end",
    [
        finish, leave, leave_while_compiling, be_refused, be_refused_by_the_core, lose_the_session,
        break_the_protocol,
    ],
)  # fmt: skip
async def test_requests_free_their_slots_and_leave_nothing(end):
    async with tiny_service(max_structured_requests=ROUNDS) as service:
        with collector_off():
            for _ in range(ROUNDS + 1):  # once more than the limit
                await end(service)
            await until(lambda: not counts(service).held(LIVE))
            await until(lambda: not num_alive(*KINDS))


async def test_requests_that_end_while_there_is_no_worker_free_their_slots():
    async with tiny_service(max_structured_requests=1) as service:
        with collector_off():
            for _ in range(2):
                await lose_the_worker(service)
                await until(lambda: not counts(service).held(LIVE))


async def test_drained_requests_free_their_slots():
    async with tiny_service() as service:
        frontend = await Frontend(service.stub).open()
        await frontend.submit(1, max_tokens=400, sampling={"structured_output": LONG})
        await frontend.read_until(lambda f: 1 in f.tokens)
        await service.core.drain.run(0.0)
        assert not counts(service).held(LIVE)


class SurpriseError(Exception):
    """An error that no code expects."""


async def test_whatever_preparing_a_request_raises_ends_that_request_alone(monkeypatch):
    async with tiny_service() as service:
        frontend = await Frontend(service.stub).open()
        await frontend.submit(1, max_tokens=400)
        core, grammars = service.core, service.server._grammars

        async def fail(*arguments):
            raise SurpriseError("secret")

        with monkeypatch.context() as context:
            context.setattr(grammars, "constrain", fail)
            await frontend.submit(2, sampling={"structured_output": SHORT})
            await frontend.read_until(lambda f: 2 in f.rejected)
        with monkeypatch.context() as context:
            context.setattr(core._steps.scheduler, "add", lambda _: 1 / 0)
            await frontend.submit(3)
            await frontend.submit(4, sampling={"structured_output": SHORT})
            await frontend.read_until(lambda f: {3, 4} <= set(f.rejected))
        with monkeypatch.context() as context:
            context.setattr(core, "check_ready", lambda: 1 / 0)
            await frontend.submit(5)
            await frontend.read_until(lambda f: 5 in f.rejected)
        for failure in frontend.rejected.values():
            assert failure.code == grpc.StatusCode.INTERNAL.value[0]
            assert "internal error" in failure.message
            assert "secret" not in failure.message
        assert core.counters.rejected["INTERNAL"] == 4
        assert not counts(service).held(LIVE)
        await frontend.submit(6, sampling={"structured_output": SHORT})
        await frontend.read_until(lambda f: {1, 6} <= set(f.finished))
