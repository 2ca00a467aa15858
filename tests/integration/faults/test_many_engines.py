"""A frontend with several real engines: one dies, freezes, drains or comes back in mid-stream."""

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from protos.common.v1.sampling_pb2 import SamplingParams, Usage
from protos.engine.v1.engine_pb2 import DrainRequest
from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.engine_client import engine_stub
from tests.support.engine_fleet import EngineFleet, engine_fleet, num_ready
from tests.support.forked_program import run_octavo
from tests.support.pace import stopped
from tests.support.processes import ServiceProcess

MAX_TOKENS = 180
SILENCE_LIMIT_S = 6.0
"""Longer than a busy machine holds an engine up that is not frozen."""
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=0, frequency_penalty=0.4, repetition_penalty=1.1, min_tokens=150),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 5, presence_penalty=0.3),
]
"""Positions and output tokens must be counted on from the values before the loss."""


@dataclass
class Answer:
    """All that a client saw of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    finish_reason: int = 0


def request(index: int, sampling: SamplingParams) -> pb.GenerateRequest:
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    params.MergeFrom(sampling)
    return pb.GenerateRequest(
        text=f"Once upon a time, {'ABCDEFGH'[index % 8]} had {index} foxes and",
        options=pb.GenerationOptions(sampling=params),
    )


async def ask(
    fleet: EngineFleet, ask_for: pb.GenerateRequest, on_tokens: Callable[[int], None] | None = None
) -> Answer:
    answer = Answer()
    async for response in fleet.stub.Generate(ask_for):
        output = response.output
        answer.token_ids += output.token_ids
        answer.text += output.text
        if output.finish_reason:
            answer.finish_reason, answer.usage = output.finish_reason, output.usage
        if on_tokens is not None:
            on_tokens(len(answer.token_ids))
    return answer


async def interrupted(
    fleet: EngineFleet, asks: Sequence[pb.GenerateRequest], rng: random.Random
) -> tuple[ServiceProcess, list[Answer]]:
    """Runs requests and kills the engine on which one first comes to a random token."""
    fleet.stop_after(rng.randint(1, MAX_TOKENS // 3))
    running = [asyncio.create_task(ask(fleet, each)) for each in asks]
    victim = await fleet.stopped()
    victim.kill()
    return victim, list(await asyncio.gather(*running))


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == expected.usage.output_tokens


def num_moved(listing: pb.ListEnginesResponse) -> int:
    """Times that a request resumed on another engine, after tokens or before the first."""
    return listing.num_migrations + listing.num_retries


async def kill_again_and_again(num_kills: int, num_engines: int) -> None:
    rng = random.Random(num_kills)
    async with engine_fleet(num_engines) as fleet:
        asks = [request(index, sampling) for index, sampling in enumerate(SAMPLINGS)]
        expected = [await ask(fleet, each) for each in asks]
        for _ in range(num_kills):
            await fleet.wait_until_ready(2)
            before = num_moved(await fleet.listing())
            victim, answers = await interrupted(fleet, asks, rng)
            for answer, whole in zip(answers, expected, strict=True):
                assert_same(answer, whole)
            assert num_moved(await fleet.listing()) > before
            victim.start()


async def test_streams_go_on_unchanged_when_their_engine_is_killed():
    await kill_again_and_again(num_kills=1, num_engines=2)


@pytest.mark.faults
@pytest.mark.timeout(1200)
async def test_streams_go_on_unchanged_over_fifty_kills():
    await kill_again_and_again(num_kills=50, num_engines=3)


async def test_an_engine_that_freezes_drains_or_loses_its_worker_costs_no_stream():
    async with engine_fleet(2, engine_silence_timeout_s=SILENCE_LIMIT_S) as fleet:
        await _follow_the_prefix(fleet)
        ask_for = request(0, SAMPLINGS[1])
        expected = await ask(fleet, ask_for)
        for misfortune in (_freeze, _lose_worker, _drain, _cut_off):
            await fleet.wait_until_ready(2)
            fleet.stop_after(20)
            has_begun = asyncio.Event()
            running = asyncio.create_task(ask(fleet, ask_for, lambda _, e=has_begun: e.set()))
            await has_begun.wait()
            engine = await fleet.stopped()
            await misfortune(fleet, engine)
            assert_same(await running, expected)
            if not engine.is_running:
                engine.start()


async def _follow_the_prefix(fleet: EngineFleet) -> None:
    """Requests that begin alike go where their beginning is cached."""
    story = "Once upon a time, Mia had a fox and Tom had an owl. " * 8

    def telling(end: str, salt: str) -> pb.GenerateRequest:
        sampling = SamplingParams(temperature=0, max_tokens=2)
        options = pb.GenerationOptions(sampling=sampling, cache_salt=salt)
        return pb.GenerateRequest(text=story + end, options=options)

    first = await ask(fleet, telling("", "ours"))
    assert first.usage.cached_tokens == 0
    await fleet.wait_for(lambda listing: any(e.num_known_prefixes for e in listing.engines))
    for end in ("The fox", "The owl", "Mia", "Tom"):
        # An engine whose last step seems to take long would not be asked.
        await fleet.wait_for(lambda listing: not any(e.num_running for e in listing.engines))
        usage = (await ask(fleet, telling(end, "ours"))).usage
        assert usage.cached_tokens > 0.8 * usage.prompt_tokens
    assert (await ask(fleet, telling("", "theirs"))).usage.cached_tokens == 0


async def _freeze(fleet: EngineFleet, engine: ServiceProcess) -> None:
    before = (await fleet.listing()).num_migrations
    async with stopped(engine):
        engine.signal(signal.SIGSTOP)
        await fleet.wait_for(lambda listing: listing.num_migrations > before)
        assert f"it was silent for {SILENCE_LIMIT_S} s" in fleet.frontend.log
        engine.signal(signal.SIGCONT)


async def _lose_worker(fleet: EngineFleet, engine: ServiceProcess) -> None:
    """Whether the engine's next worker goes on or another engine is not the client's concern."""
    del fleet
    async with stopped(engine) as worker:
        worker.kill()


async def _drain(fleet: EngineFleet, engine: ServiceProcess) -> None:
    """A drain lets the request finish, while others are served elsewhere."""
    async with stopped(engine):
        engine.signal(signal.SIGTERM)
        await fleet.wait_for(lambda listing: num_ready(listing) == 1)
        health = await octavo("health", fleet.frontend.address)
        assert health.startswith(f"serving, engines 1/2 used\n  {engine.address}: ")
        await ask(fleet, request(1, SAMPLINGS[0]))
    assert await asyncio.to_thread(engine.wait) == 0


async def _cut_off(fleet: EngineFleet, engine: ServiceProcess) -> None:
    """A drain that waits for no request lets another engine finish."""
    before = (await fleet.listing()).num_migrations
    async with stopped(engine), engine_stub(engine.address) as stub:
        drained = await stub.Drain(DrainRequest(timeout_ms=0))
        assert drained.num_aborted == 1
    await fleet.wait_for(lambda listing: listing.num_migrations > before)
    assert await asyncio.to_thread(engine.wait) == 0


async def octavo(*arguments: str) -> str:
    """Returns the output of a command of the command line."""
    ended = await asyncio.to_thread(run_octavo, *arguments)
    ended.check_returncode()
    return ended.stdout
