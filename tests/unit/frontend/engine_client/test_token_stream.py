"""A request whose engine refuses it or dies goes on with another, and its caller sees no seam."""

import asyncio
import contextlib

import grpc
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.engine_client.session import SILENCE_CHECKS
from tests.support.fake_engine import FakeEngine, Script, says
from tests.support.frontend_stack import FrontendStack, frontend_stack
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

TEXT = "one two \N{SNOWMAN} three four \N{HUGGING FACE} five " * 6
FULL = Failure(code=8, message="full", retry_after_ms=70)
GONE = Failure(code=14, message="the worker is gone")


def request(**options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="one two", options=pb.GenerationOptions(**options))


async def collect(call) -> list[pb.Output]:
    outputs = []
    while (response := await call.read()) is not grpc.aio.EOF:
        outputs.append(response.output)
    return outputs


def text_of(outputs: list[pb.Output]) -> str:
    return "".join(output.text for output in outputs)


async def error_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value


async def counts(stack: FrontendStack) -> tuple[int, int]:
    listing = await stack.stub.ListEngines(pb.ListEnginesRequest())
    return listing.num_retries, listing.num_migrations


async def heard(stack: FrontendStack, second: FakeEngine) -> None:
    """Waits until the frontend knows the second engine's load."""
    view = stack.server.engine.engines[1].view
    await until(lambda: view.heartbeat.num_used_blocks == second.load["num_used_blocks"])


@contextlib.asynccontextmanager
async def pair(*, script: Script | None = None, **config: object):
    """Two engines and a frontend; the first engine gets the first request."""
    first = FakeEngine(script=script or says(TEXT))
    second = FakeEngine(engine_id="engine-2", script=first.script, load={"num_used_blocks": 50})
    async with first, second, frontend_stack(first, second, **config) as stack:
        await heard(stack, second)
        yield first, second, stack


async def begin(
    stack: FrontendStack, first: FakeEngine, ask_for: pb.GenerateRequest, num_tokens: int
):
    """Lets the first engine make this many tokens and no more; returns the call and its outputs."""
    first.hold_at = num_tokens
    call = stack.stub.Generate(ask_for)
    outputs: list[pb.Output] = []
    while sum(len(output.token_ids) for output in outputs) < num_tokens:
        outputs.append((await call.read()).output)
    return call, outputs


async def broken_off(
    stack: FrontendStack, first: FakeEngine, ask_for: pb.GenerateRequest, num_tokens: int
) -> list[pb.Output]:
    """Reads some tokens, kills the engine and reads the rest."""
    call, outputs = await begin(stack, first, ask_for, num_tokens)
    await first.die()
    return outputs + await collect(call)


class TestBeforeTheFirstToken:
    @pytest.mark.parametrize("rejection", [FULL, GONE])
    async def test_a_refused_request_is_sent_to_another(self, rejection):
        async with pair() as (first, second, stack):
            first.rejection = rejection
            assert text_of(await collect(stack.stub.Generate(request()))) == TEXT
            assert (len(first.submits), len(second.submits)) == (1, 1)
            assert await counts(stack) == (1, 0)

    async def test_a_request_that_is_wrong_is_not(self):
        async with pair() as (first, second, stack):
            first.rejection = Failure(code=3, message="wrong")
            error = await error_of(stack.stub.Generate(request()))
            assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "wrong")
            assert not second.submits

    async def test_what_every_engine_refuses_is_refused_with_its_pushback(self):
        async with pair() as (first, second, stack):
            first.rejection = second.rejection = FULL
            error = await error_of(stack.stub.Generate(request()))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("grpc-retry-pushback-ms", "70") in tuple(error.trailing_metadata())

    async def test_an_engine_that_dies_is_replaced(self):
        async with pair() as (first, second, stack):
            first.pause()
            call = stack.stub.Generate(request())
            await until(lambda: first.live)
            await first.die()
            assert text_of(await collect(call)) == TEXT
            assert second.submits[0].num_resumed_tokens == 0

    async def test_no_more_engines_are_tried_than_allowed(self):
        async with pair(max_engine_attempts=1) as (first, second, stack):
            first.rejection = FULL
            error = await error_of(stack.stub.Generate(request()))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not second.submits

    async def test_another_try_has_the_time_that_is_left(self):
        async with pair() as (first, second, stack):
            first.pause()
            call = stack.stub.Generate(request(), timeout=30)
            await until(lambda: first.live)
            await asyncio.sleep(0.002)
            await first.die()
            await collect(call)
            assert second.submits[0].timeout_ms < first.submits[0].timeout_ms


class TestInMidStream:
    @pytest.mark.parametrize("num_tokens", [1, 5, 17])
    async def test_nothing_is_lost_and_nothing_comes_twice(self, num_tokens):
        sampling = SamplingParams(logprobs=0, temperature=1)
        async with pair() as (first, second, stack):
            outputs = await broken_off(stack, first, request(sampling=sampling), num_tokens)
            assert text_of(outputs) == TEXT
            tokens = [token for output in outputs for token in output.token_ids]
            assert tokens == first.script([])
            chosen = [entry.chosen.token_id for output in outputs for entry in output.logprobs]
            assert chosen == tokens
            usage = outputs[-1].usage
            assert usage.output_tokens == len(tokens)
            assert usage.prompt_tokens == len(first.submits[0].prompt_token_ids) // 4
            assert second.submits[0].num_resumed_tokens == num_tokens
            assert await counts(stack) == (0, 1)

    async def test_the_next_engine_draws_from_the_same_seed(self):
        async with pair() as (first, second, stack):
            await broken_off(stack, first, request(), 3)
            assert first.submits[0].sampling.HasField("seed")
            assert second.submits[0].sampling == first.submits[0].sampling

    async def test_a_stop_string_may_begin_at_one_engine_and_end_at_the_next(self):
        async with pair() as (first, _, stack):
            stop = "four \N{HUGGING FACE} five one"
            outputs = await broken_off(stack, first, request(stop=[stop]), 12)
            assert text_of(outputs) == TEXT[: TEXT.index(stop)]
            assert outputs[-1].stop_string == stop

    async def test_a_worker_that_dies_is_no_end_either(self):
        async with pair() as (first, _, stack):
            first.failure = GONE
            first.script = lambda prompt: says(TEXT)(prompt)[:9]
            outputs = await collect(stack.stub.Generate(request()))
            assert text_of(outputs) == TEXT

    async def test_a_fault_of_the_request_itself_is_not_passed_on(self):
        async with pair() as (first, second, stack):
            first.failure = Failure(code=13, message="internal error abc")
            error = await error_of(stack.stub.Generate(request()))
            assert error.code() == grpc.StatusCode.INTERNAL
            assert not second.submits

    async def test_a_request_that_cannot_go_on_exactly_ends_and_says_why(self):
        async with pair() as (first, second, stack):
            second.rejection = Failure(code=3, message="it has a smaller cache")
            call, _ = await begin(stack, first, request(), 3)
            await first.die()
            error = await error_of(call)
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert "another cannot go on: it has a smaller cache" in error.details()

    async def test_without_another_engine_the_loss_is_reported(self):
        async with pair() as (first, second, stack):
            await second.die()
            await until(lambda: not stack.server.engine.engines[1].is_ready)
            call, _ = await begin(stack, first, request(), 3)
            await first.die()
            error = await error_of(call)
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert "lost the engine" in error.details()

    async def test_a_silent_engine_is_left(self):
        async with pair(engine_silence_timeout_s=60) as (first, second, stack):
            call, outputs = await begin(stack, first, request(), 3)
            first.mute()
            time = LoopTime()
            while stack.server.engine.engines[0].is_ready:
                time.wind(60 / SILENCE_CHECKS)
                second.load["num_used_blocks"] += 1
                await heard(stack, second)
            assert text_of(outputs + await collect(call)) == TEXT

    async def test_a_cancelled_request_goes_nowhere(self):
        async with pair() as (first, second, stack):
            first.hold_at = 1
            session = stack.stub.Session()
            await session.write(pb.SessionRequest(handle=1, generate=request()))
            await session.read()
            first.mute()
            await session.write(pb.SessionRequest(handle=1, cancel=pb.Cancel()))
            await until(lambda: first.aborted)
            await first.die()
            last = await session.read()
            assert last.failure.code == grpc.StatusCode.UNAVAILABLE.value[0]
            assert not second.submits
            session.cancel()


async def test_a_request_of_two_engines_says_so_if_their_weights_differ():
    for versions in (("old", "new"), ("", "new"), ("same", "same")):
        async with pair() as (first, second, stack):
            first.weights_version, second.weights_version = versions
            outputs = await broken_off(stack, first, request(), 3)
            usage, (begun, ended) = outputs[-1].usage, versions
            assert usage.weights_version == ended
            assert usage.HasField("first_weights_version") == (begun != ended)
            assert begun == ended or usage.first_weights_version == begun
