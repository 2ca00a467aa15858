"""A client process of the serving benchmark: its share of the requests over one session."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc
import numpy as np
import uvloop

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1 import frontend_pb2
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.transport.grpc_options import channel_options
from tests.bench.workload import Job

MAX_MESSAGE_BYTES = 16 * 2**20
CREDIT_EVERY = 16
"""Step messages between two credits; the engine allows 64 unread by default."""


@dataclass
class Outcome:
    """Observations of one client; times are of time.monotonic(), which all processes share."""

    ended_s: float = 0.0
    num_tokens: int = 0
    num_messages: int = 0
    cpu_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    error: str = ""


Begin = Callable[[], Awaitable[None]]
"""Says that everything is prepared, and returns when all clients shall submit."""

Drive = Callable[[grpc.aio.Channel, Sequence[Job], Outcome, Begin], Awaitable[None]]


class RequestFailedError(Exception):
    """A service refused a request or failed it."""


def run_client(path: str, address: str, jobs: Sequence[Job], port: Connection) -> None:
    """Prepares, says so, waits for the signal to begin, and sends back an Outcome.

    Args:
        path: "engine" or "services".
        address: of the engine or the frontend.
        jobs: what to submit, all at once.
        port: receives True, sends True when prepared, receives the time to begin, sends an Outcome;
            over and over until it is closed.
    """
    uvloop.run(_run(PATHS[path], address, jobs, port))


class _Seen:
    """Notes first tokens and endings."""

    def __init__(self, count: int, outcome: Outcome) -> None:
        self.num_left = count
        self._outcome = outcome
        self._is_new = [True] * count
        self._started_s = time.monotonic()

    def first(self, handle: int) -> None:
        if self._is_new[handle]:
            self._is_new[handle] = False
            self._outcome.ttft_s.append(time.monotonic() - self._started_s)


async def over_engine(
    channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, begin: Begin
) -> None:
    """Sends token ids over an engine's session, as a frontend does."""
    call = EngineServiceStub(channel).Session()
    hello = engine_pb2.FrontendHello(frontend_id="bench")
    await call.write(engine_pb2.FrontendMessage(hello=hello))
    await call.read()
    submits = [
        engine_pb2.FrontendMessage(
            submit=engine_pb2.Submit(
                handle=handle,
                request_id=f"bench-{id(outcome)}-{time.monotonic_ns()}-{handle}",
                prompt_token_ids=np.array(job.prompt, "<u4").tobytes(),
                sampling=_sampling(job),
            )
        )
        for handle, job in enumerate(jobs)
    ]
    await begin()
    seen = _Seen(len(jobs), outcome)
    writing = asyncio.create_task(_write_all(call, submits))
    num_steps = 0
    while seen.num_left:
        message = await call.read()
        if message is grpc.aio.EOF:
            raise RequestFailedError("the engine ended the session")
        if message.HasField("rejected"):
            raise RequestFailedError(message.rejected.failure.message)
        if not message.HasField("step"):
            continue
        outcome.num_messages += 1
        outcome.num_tokens += len(message.step.token_ids) // 4
        for handle in np.frombuffer(message.step.handles, "<u4").tolist():
            seen.first(handle)
        for finished in message.step.finished:
            if finished.HasField("failure"):
                raise RequestFailedError(finished.failure.message)
            seen.num_left -= 1
        num_steps += 1
        if num_steps % CREDIT_EVERY == 0:
            await writing
            credit = engine_pb2.Credit(steps_read=num_steps)
            await call.write(engine_pb2.FrontendMessage(credit=credit))
    outcome.ended_s = time.monotonic()
    await writing
    call.cancel()


async def over_services(
    channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, begin: Begin
) -> None:
    """Sends token ids over a frontend's session and reads text and tokens."""
    messages = [
        frontend_pb2.SessionRequest(
            handle=handle,
            generate=frontend_pb2.GenerateRequest(
                tokens=frontend_pb2.TokenIds(ids=job.prompt),
                options=frontend_pb2.GenerationOptions(sampling=_sampling(job)),
            ),
        )
        for handle, job in enumerate(jobs)
    ]
    call = FrontendServiceStub(channel).Session()
    await begin()
    seen = _Seen(len(jobs), outcome)
    writing = asyncio.create_task(_write_all(call, messages))
    while seen.num_left:
        message = await call.read()
        if message is grpc.aio.EOF:
            raise RequestFailedError("the frontend ended the session")
        if message.HasField("failure"):
            raise RequestFailedError(message.failure.message)
        output = message.output
        outcome.num_messages += 1
        if output.token_ids:
            outcome.num_tokens += len(output.token_ids)
            seen.first(message.handle)
        if output.finish_reason:
            seen.num_left -= 1
    outcome.ended_s = time.monotonic()
    await writing
    call.cancel()


PATHS = {"engine": over_engine, "services": over_services}


async def _run(drive: Drive, address: str, jobs: Sequence[Job], port: Connection) -> None:
    options = channel_options(MAX_MESSAGE_BYTES)
    while await asyncio.to_thread(port.recv):
        outcome = Outcome()

        async def begin(outcome: Outcome = outcome) -> None:
            port.send(True)
            begin_s = await asyncio.to_thread(port.recv)
            await asyncio.sleep(max(0.0, begin_s - time.monotonic()))
            outcome.cpu_s = -time.process_time()

        async with grpc.aio.insecure_channel(address, options=options) as channel:
            try:
                await drive(channel, jobs, outcome, begin)
            except (RequestFailedError, grpc.aio.AioRpcError) as error:
                outcome.error = str(error)
            outcome.cpu_s += time.process_time()
        port.send(outcome)


async def _write_all(call: grpc.aio.StreamStreamCall, messages: Sequence[object]) -> None:
    for message in messages:
        await call.write(message)


def _sampling(job: Job) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
