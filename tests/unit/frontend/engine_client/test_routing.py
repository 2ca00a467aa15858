"""Which of several engines gets a request."""

import asyncio
import random
from dataclasses import replace

import grpc
import numpy as np
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.engine.v1.engine_pb2 import PrefixChanges
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.engine_client import circuit_breaker
from services.frontend.engine_client.circuit_breaker import MAX_FAILURES
from services.frontend.engine_client.messages import pack_uint32
from services.frontend.engine_client.prefix_keys import compact_keys
from services.frontend.engine_client.routing import WEIGHTS, Prospect, pick
from tests.support import fake_engine
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import FrontendStack, frontend_stack
from tests.support.waiting import until

PROMPT = list(range(10, 26))


def request(tokens: list[int] = PROMPT, **options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        tokens=pb.TokenIds(ids=tokens), options=pb.GenerationOptions(**options)
    )


async def ask(stack: FrontendStack, ask_for: pb.GenerateRequest | None = None) -> str:
    call = stack.stub.Generate(ask_for or request())
    return "".join([part.output.text async for part in call])


async def heard(stack: FrontendStack, **fields: int) -> None:
    """Waits until the frontend has had a heartbeat that says so."""
    await until(
        lambda: any(
            all(getattr(engine.view.heartbeat, name) == value for name, value in fields.items())
            for engine in stack.server.engine.engines
        )
    )


async def settled(stack: FrontendStack, *engines: FakeEngine) -> None:
    """Waits until the frontend knows what every engine has."""
    views = [engine.view for engine in stack.server.engine.engines]
    await until(
        lambda: all(
            not view.num_queued_blocks
            and view.num_held_blocks
            == sum(-(-len(live.prompt) // 4) for live in engine.live.values())
            for view, engine in zip(views, engines, strict=True)
        )
    )


def prefixes(tokens: list[int], salt: str = "") -> PrefixChanges:
    keys = compact_keys(salt, pack_uint32(tokens), FakeEngine.block_size, max_blocks=100)
    return PrefixChanges(reset=True, added=np.array(keys, "<u8").tobytes())


async def knows_prefixes(stack: FrontendStack) -> None:
    engines = stack.server.engine.engines
    await until(lambda: any(engine.view.num_known_prefixes for engine in engines))


async def test_requests_spread_over_engines():
    first, second = FakeEngine(), FakeEngine(engine_id="engine-2")
    async with first, second, frontend_stack(first, second) as stack:
        for start in range(4):
            await ask(stack, request(list(range(start, start + 9))))
            await settled(stack, first, second)
        assert (len(first.submits), len(second.submits)) == (2, 2)


async def test_the_engine_that_holds_less_is_chosen():
    busy = FakeEngine(load={"num_used_blocks": 100})
    idle = FakeEngine(engine_id="engine-2")
    async with busy, idle, frontend_stack(busy, idle) as stack:
        await heard(stack, num_used_blocks=100)
        for _ in range(3):
            await ask(stack)
        assert (len(busy.submits), len(idle.submits)) == (0, 3)


async def test_the_engine_with_the_prefix_is_chosen():
    cold = FakeEngine()
    warm = FakeEngine(engine_id="engine-2", prefixes=prefixes(PROMPT))
    async with cold, warm, frontend_stack(cold, warm) as stack:
        await knows_prefixes(stack)
        for _ in range(3):
            await ask(stack)
        assert (len(cold.submits), len(warm.submits)) == (0, 3)


@pytest.mark.parametrize(("num_blocks", "is_warm"), [(120, True), (136, False)])
async def test_a_prefix_is_worth_32_times_the_tokens_it_saves(num_blocks, is_warm):
    cold = FakeEngine()
    load = {"num_used_blocks": num_blocks}
    warm = FakeEngine(engine_id="engine-2", prefixes=prefixes(PROMPT), load=load)
    async with cold, warm, frontend_stack(cold, warm) as stack:
        await knows_prefixes(stack)
        await heard(stack, **load)
        await ask(stack)
        assert (len(cold.submits), len(warm.submits)) == (not is_warm, is_warm)


def prospect(*, cached=0, queued=0.0, held=0, recent=WEIGHTS.least_mean_tokens) -> Prospect:
    return Prospect(num_cached=cached, num_queued=queued, num_held=held, num_recent=recent)


@pytest.mark.parametrize(("recent", "is_warm"), [(11_000, True), (13_000, False)])
def test_an_engine_a_quarter_over_the_mean_gives_up_a_cached_prompt(recent, is_warm):
    others = [prospect(recent=10_000)] * 2
    warm = prospect(cached=992, recent=recent)
    counterweight = prospect(recent=20_000 - recent, queued=1e6)
    index = pick([*others, warm, counterweight], 1000, random.Random(0))
    assert (index == 2) == is_warm


@pytest.mark.parametrize("num_others", [1, 8])
def test_a_full_engine_gets_a_request_only_if_all_are_full(num_others):
    warm = replace(prospect(cached=992), is_full=True)
    others = [prospect(held=1000)] * num_others
    assert pick([warm, *others], 1000, random.Random(0)) != 0
    others = [replace(each, is_full=True) for each in others]
    assert pick([warm, *others], 1000, random.Random(0)) == 0


def test_a_conversation_stays_while_engines_have_little_to_do():
    prospects = [
        prospect(cached=90, recent=WEIGHTS.least_mean_tokens // 8),
        *[prospect(recent=0)] * 3,
    ]
    assert pick(prospects, 100, random.Random(0)) == 0


@pytest.mark.parametrize("recent", [0, 100_000])
def test_an_engine_that_does_not_report_its_work_is_neither_charged_nor_credited(recent):
    silent, busy = prospect(recent=None, held=64), [prospect(recent=recent)] * 2
    assert pick([silent, *busy], 1000, random.Random(0)) != 0
    assert pick([silent, prospect(recent=recent, held=128)], 1000, random.Random(0)) == 0


@pytest.mark.parametrize("recent", [None, 2**64 - 1])
def test_engines_that_all_say_the_same_of_their_work_are_told_apart_by_the_rest(recent):
    prospects = [prospect(recent=recent, held=held) for held in (128, 0, 64)]
    assert pick(prospects, 1000, random.Random(0)) == 1


def test_an_engine_that_has_just_come_is_not_overrun():
    come = prospect(recent=0, queued=8 * 2000)
    assert pick([prospect(recent=100_000), come], 1000, random.Random(0)) == 0
    come = prospect(recent=0, queued=4 * 1000)
    assert pick([prospect(recent=100_000), come], 1000, random.Random(0)) == 1


def test_an_engine_with_the_adapter_on_its_device_is_preferred_until_it_has_more_to_do():
    draw = random.Random(7)
    loaded, idle = prospect(), replace(prospect(), must_load=True)
    assert pick([idle, loaded], 100, draw) == 1
    busy = prospect(queued=2 * WEIGHTS.load / WEIGHTS.queued)
    assert pick([idle, busy], 100, draw) == 0


def test_frontends_that_know_the_same_do_not_all_choose_one_engine():
    prospects = [prospect(held=index) for index in range(64)]
    chosen = {pick(prospects, 100, random.Random(seed)) for seed in range(8)}
    assert len(chosen) > 4


def test_the_engine_that_has_the_prompt_is_among_those_compared():
    prospects = [prospect()] * 40 + [prospect(cached=96)] + [prospect()] * 23
    assert {pick(prospects, 100, random.Random(seed)) for seed in range(8)} == {40}


@pytest.mark.parametrize("num_engines", [2, 8, 64])
def test_a_prefix_that_all_prompts_share_comes_to_live_on_all_engines(num_engines):
    shared, own, num_frontends = 128, 64, 4
    draws = [random.Random(seed) for seed in range(num_frontends)]
    work, has_prefix = [0] * num_engines, [False] * num_engines
    for _ in range(20):  # a round of requests between two heartbeats, which no other frontend sees
        seen = list(work), list(has_prefix)
        sent = [[0] * num_engines for _ in draws]
        for number in range(8 * num_engines):
            frontend = number % num_frontends
            prospects = [
                prospect(
                    cached=shared * had,
                    queued=sent[frontend][index],
                    recent=done + sent[frontend][index],
                )
                for index, (done, had) in enumerate(zip(*seen, strict=True))
            ]
            index = pick(prospects, shared + own, draws[frontend])
            missing = own if has_prefix[index] else shared + own
            sent[frontend][index] += missing
            work[index] += missing
            has_prefix[index] = True
    assert all(has_prefix)
    assert max(work) < 1.2 * sum(work) / num_engines


async def test_a_prefix_under_another_salt_is_none():
    cold = FakeEngine()
    warm = FakeEngine(
        engine_id="engine-2", prefixes=prefixes(PROMPT, "theirs"), load={"num_used_blocks": 1}
    )
    async with cold, warm, frontend_stack(cold, warm) as stack:
        await knows_prefixes(stack)
        await heard(stack, num_used_blocks=1)
        await ask(stack, request(cache_salt="ours"))
        await ask(stack, request(cache_salt="theirs"))
        assert [submit.cache_salt for submit in cold.submits] == ["ours"]
        assert [submit.cache_salt for submit in warm.submits] == ["theirs"]


async def test_an_engine_with_keys_of_another_version_is_used_and_not_asked_for_them():
    async with FakeEngine(prefix_key_version=0) as engine, frontend_stack(engine) as stack:
        await ask(stack)
        [hello] = engine.hellos
        assert not hello.wants_prefixes
        assert not hello.prefix_key_version  # an older engine refuses fields that it does not know


async def test_requests_that_begin_alike_follow_each_other_at_once(monkeypatch):
    # After some heartbeats these engines would seem to have cached nothing.
    monkeypatch.setattr(fake_engine, "HEARTBEAT_INTERVAL_S", 3600)
    first, second = FakeEngine(), FakeEngine(engine_id="engine-2")
    long = list(range(200))
    async with first, second, frontend_stack(first, second) as stack:
        first.pause()
        second.pause()
        calls = [stack.stub.Generate(request([*long, index])) for index in range(2)]
        await until(lambda: len(first.submits) + len(second.submits) == 2)
        assert 0 in (len(first.submits), len(second.submits))
        for call in calls:
            call.cancel()


async def test_an_engine_whose_step_takes_long_is_the_last_choice():
    stuck = FakeEngine(load={"step_age_ms": 60_000})
    busy = FakeEngine(engine_id="engine-2", load={"num_used_blocks": 1000})
    async with stuck, busy, frontend_stack(stuck, busy) as stack:
        await heard(stack, step_age_ms=60_000)
        await ask(stack)
        assert (len(stuck.submits), len(busy.submits)) == (0, 1)
        await busy.die()
        await until(lambda: sum(engine.is_ready for engine in stack.server.engine.engines) == 1)
        assert await ask(stack) == "hello world"


async def test_an_engine_that_fails_requests_is_spared(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 3600)
    broken = FakeEngine(rejection=Failure(code=14, message="no"))
    sound = FakeEngine(engine_id="engine-2", load={"num_used_blocks": 1000})
    async with broken, sound, frontend_stack(broken, sound) as stack:
        await heard(stack, num_used_blocks=1000)
        for _ in range(3 * MAX_FAILURES):
            assert await ask(stack) == "hello world"
        assert len(broken.submits) == MAX_FAILURES
        cards = (await stack.stub.ListEngines(pb.ListEnginesRequest())).engines
        assert [card.ready for card in cards] == [False, True]
        assert "spared" in cards[0].reason


async def test_the_only_engine_is_never_spared():
    engine = FakeEngine(rejection=Failure(code=14, message="not now"))
    async with engine, frontend_stack(engine) as stack:
        for _ in range(2 * MAX_FAILURES):
            with pytest.raises(grpc.aio.AioRpcError, match="not now"):
                await ask(stack)
        assert len(engine.submits) == 2 * MAX_FAILURES


async def test_load_spreads_while_answers_are_running():
    engines = [FakeEngine(engine_id=f"engine-{index}") for index in range(3)]
    async with engines[0], engines[1], engines[2], frontend_stack(*engines) as stack:
        for engine in engines:
            engine.pause()
        asks = []
        for number in range(9):
            asks.append(asyncio.create_task(ask(stack, request([number] * 9))))
            # A heartbeat from before an engine had it has come by the time that it is admitted.
            await until(lambda: sum(stack.server.requests.counts.submit.counts) == len(asks))
            await settled(stack, *engines)
        assert [len(engine.submits) for engine in engines] == [3, 3, 3]
        for engine in engines:
            engine.resume()
        assert await asyncio.gather(*asks) == ["hello world"] * 9
