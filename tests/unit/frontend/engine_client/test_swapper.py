"""Models that share a card: who is awake, who waits, and what failures cost, in virtual time."""

import asyncio
import random

import pytest

from services.frontend.engine_client.swapper import LOST_S
from services.frontend.errors import (
    DeadlineExpiredError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from tests.support.shared_card import SLEEP_S, STEP_S, WAKE_S, Engine, now, sharing, virtual


@virtual
async def test_the_first_request_wakes_its_model_and_an_idle_one_makes_room_at_once():
    async with sharing("a", "b") as card:
        assert await card.request("a", 1) == pytest.approx(WAKE_S)
        assert await card.request("a", 1) == 0
        assert await card.request("b", 1) == pytest.approx(SLEEP_S + WAKE_S)
        assert card.woken == ["a", "b"]
        assert card.swapper.counts.num_wakes == {"a": 1, "b": 1}
        assert card.swapper.awake == {"a": False, "b": True}


@virtual
async def test_a_model_with_requests_keeps_the_card_for_its_time_and_lets_them_end():
    async with sharing("a", "b", min_awake_s=10, drain_s=5) as card:
        first = card.start("a", 3)
        await first
        awake_s = now() - 3
        stream = [card.start("a", 2) for _ in range(2)]
        await asyncio.sleep(1)
        other = card.start("b", 1)
        while now() < awake_s + 9:  # there is always a request that runs
            stream.append(card.start("a", 2))
            await asyncio.sleep(1)
        late = card.start("a", 1)
        await asyncio.sleep(2)
        after = card.start("a", 1)  # closed by now: it waits for the next turn
        await asyncio.gather(*stream, late, other, after)
        assert card.woken == ["a", "b", "a"]
        assert card.swapper.counts.num_kept == 0
        assert await other < 10 + 2 + SLEEP_S + WAKE_S
        assert await late == 0
        assert await after > 0


@virtual
async def test_long_requests_are_kept_asleep_and_go_on_in_the_next_turn():
    async with sharing("a", "b", min_awake_s=2, drain_s=3) as card:
        long = card.start("a", 60)
        await asyncio.sleep(2)
        assert await card.request("b", 1) <= 2 + 3 + SLEEP_S + WAKE_S + STEP_S
        await long
        assert card.engines[0].modes == ["recompute"]
        assert card.swapper.counts.num_kept == 1
        assert card.woken == ["a", "b", "a"]


@virtual
async def test_a_prompt_that_takes_longer_than_a_turn_gets_a_longer_one():
    for drain_s in (3, 0):
        async with sharing("a", "b", min_awake_s=2, drain_s=drain_s) as card:
            async with asyncio.timeout(400):
                await asyncio.gather(card.prompt("a", 40), card.prompt("b", 50))
            short = [card.start(name, 30) for name in "ab"]
            await asyncio.gather(*short)
            assert all(each.num_vain_turns == 0 for each in card.swapper._seats.values())


@virtual
async def test_the_model_that_waits_longest_is_next_and_none_is_left_out():
    async with sharing("a", "b", "c", min_awake_s=1, drain_s=1) as card:
        long = [card.start(name, 20) for name in "abc" if not await asyncio.sleep(0.01)]
        await asyncio.gather(*long)
        assert card.woken[:6] == ["a", "b", "c", "a", "b", "c"]


@virtual
async def test_thousands_of_random_requests_all_end_and_wait_no_longer_than_the_others_turns():
    draw = random.Random(7)
    async with sharing("a", "b", "c", min_awake_s=4, drain_s=2, max_waiting=5000) as card:
        requests = []
        for _ in range(3000):
            await asyncio.sleep(draw.expovariate(20))
            name = draw.choices("abc", (20, 5, 1))[0]
            requests.append(card.start(name, draw.expovariate(1 / 3)))
        waits = await asyncio.gather(*requests)
        turn_s = 4 + 2 + SLEEP_S + WAKE_S + STEP_S
        # Its own model's drain, each other model's turn, and its own wake.
        assert max(waits) <= 3 * turn_s
        assert len(card.woken) < now() / 4, "no turn is cut short while there are requests"


@virtual
async def test_a_full_queue_refuses_and_room_in_it_is_given_back():
    async with sharing("a", "b", max_waiting=2) as card:
        running = card.start("a", 30)
        await asyncio.sleep(2)
        waiting = [card.start("b", 1) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 requests wait for the model 'b'") as caught:
            card.swapper.ask("b")
        assert caught.value.retry_after_ms
        waiting[0].cancel()
        await asyncio.sleep(0)
        waiting.append(card.start("b", 1))
        await asyncio.gather(running, *waiting[1:])


@virtual
async def test_requests_that_leave_do_not_cost_a_swap():
    async with sharing("a", "b", min_awake_s=5) as card:
        running = card.start("a", 30)
        await asyncio.sleep(2)
        gone = card.start("b", 1)
        with pytest.raises(DeadlineExpiredError, match="the model 'b'"):
            await card.request("b", 1, deadline_s=3)
        await asyncio.sleep(2)  # past the floor: closed for b's sake
        assert card.swapper.is_swapped_out("a")
        gone.cancel()
        await asyncio.sleep(0.1)
        assert await card.request("a", 1) == 0
        await running
        assert card.woken == ["a"]


@virtual
async def test_a_turn_that_is_ended_while_it_waits_begins_no_more():
    async with sharing("a", "b") as card:
        turn = card.swapper.ask("a")
        waiting = asyncio.create_task(turn.wait(None))
        await asyncio.sleep(0)
        turn.end()
        assert not await waiting
        assert await card.request("b", 1) > 0
        assert card.woken[-1] == "b"


@virtual
async def test_a_model_that_cannot_be_woken_fails_its_requests_and_the_other_goes_on():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        card.engines[1].wake_error = OverloadedError("1 GiB free", retry_after_ms=None)
        refused = [card.start("b", 1), card.start("b", 1)]
        for each in refused:
            with pytest.raises(EngineUnavailableError, match="'b' could not be woken: 1 GiB free"):
                await each
        assert await card.request("a", 1) == pytest.approx(WAKE_S)
        card.engines[1].wake_error = None
        await card.request("b", 1)
        assert card.swapper.counts.num_failures == {"b": 1}


@virtual
async def test_the_reason_is_kept_from_callers_where_engines_are():
    async with sharing("a", names_reasons=False) as card:
        card.engines[0].wake_error = OverloadedError("1 GiB free", retry_after_ms=None)
        with pytest.raises(EngineUnavailableError, match=r"'a' could not be woken$"):
            await card.request("a", 1)


@virtual
async def test_a_model_that_cannot_sleep_stays_awake_and_the_others_requests_fail():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        card.engines[0].sleep_error = InvalidRequestError("the checkpoint has changed")
        with pytest.raises(EngineUnavailableError, match="'a' has the card and cannot be put to"):
            await card.request("b", 1)
        assert await card.request("a", 1) == 0
        card.engines[0].sleep_error = None
        await card.request("b", 1)


@virtual
async def test_others_wait_for_a_worker_that_restarts_until_it_failed_often():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        card.engines[0].sleep_error = EngineUnavailableError("its worker is starting")
        waiting = card.start("b", 1)
        await asyncio.sleep(2)
        card.engines[0].sleep_error = None
        await waiting
        await card.request("a", 1)
        card.engines[0].sleep_error = EngineUnavailableError("its worker is starting")
        with pytest.raises(EngineUnavailableError, match="its worker is starting"):
            await card.request("b", 1)


@virtual
async def test_an_engine_killed_awake_frees_the_card_once_its_successor_connects():
    async with sharing("a", "b") as card:
        running = card.start("a", 30)
        await asyncio.sleep(2)
        waiting = card.start("b", 1)
        await card.lose(card.engines[0])
        with pytest.raises(EngineUnavailableError, match="'a' is not there"):
            card.swapper.ask("a")
        await asyncio.sleep(3)
        assert card.woken == ["a"], "its memory may still be there"
        card.find(card.engines[0])
        await waiting
        with pytest.raises(AssertionError, match="lost"):
            await running
        await card.request("a", 1)
        assert card.woken == ["a", "b", "a"]


@virtual
async def test_an_engine_that_stays_away_does_not_keep_the_card():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        await card.lose(card.engines[0])
        assert await card.request("b", 1) == pytest.approx(LOST_S + WAKE_S)


@virtual
async def test_an_engine_lost_while_it_falls_asleep_or_wakes_does_not_stop_the_others():
    async with sharing("a", "b") as card:
        for name, hanging in (("b", 0), ("b", 1)):
            await card.request("a", 1)
            card.engines[hanging].hangs = True
            waiting = card.start(name, 1)
            await asyncio.sleep(SLEEP_S + 0.1)
            await card.lose(card.engines[hanging])
            if hanging:
                with pytest.raises(EngineUnavailableError, match="'b' was lost"):
                    await waiting
            card.find(card.engines[hanging])
            if not hanging:
                await waiting
        await card.request("b", 1)
        await card.request("a", 1)


@virtual
async def test_a_frozen_engine_that_comes_back_awake_is_put_to_sleep():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        await card.lose(card.engines[0], keeps_card=True)
        card.find(card.engines[0])
        await card.request("b", 1)
        assert card.engines[0].is_asleep
        assert card.woken == ["a", "b"]


@virtual
async def test_a_new_frontend_learns_who_is_awake_before_it_orders_anything():
    async with sharing("a", "b", connects=False) as card:
        card.engines[1].is_asleep = False
        with pytest.raises(EngineUnavailableError):
            card.swapper.ask("a")
        card.swapper.note(card.engines[0])
        waiting = card.start("a", 1)
        await asyncio.sleep(2)
        card.swapper.note(card.engines[1])
        await waiting
        assert card.engines[1].modes == ["recompute"]
        assert card.woken == ["b", "a"] or card.woken == ["a"]


@virtual
async def test_another_operators_sleep_is_noticed_and_demand_ends_it():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        card.engines[0].is_asleep = True
        card.swapper.note(card.engines[0])
        assert await card.request("a", 1) == pytest.approx(WAKE_S)


@virtual
async def test_an_engine_lost_while_it_waits_for_the_card_leaves_it_to_others():
    async with sharing("a", "b", "c", min_awake_s=0, drain_s=0) as card:
        first = card.start("a", 1)
        await first
        lost = card.start("b", 1)
        await asyncio.sleep(SLEEP_S / 2)
        other = card.start("c", 1)
        await card.lose(card.engines[1])
        with pytest.raises(EngineUnavailableError, match="'b' was lost"):
            await lost
        assert await other < SLEEP_S + WAKE_S + STEP_S
        assert card.swapper.counts.num_failures == {}


@virtual
async def test_a_model_whose_engine_has_another_address_is_found_there():
    async with sharing("a", "b") as card:
        await card.request("b", 1)
        for _ in range(3):
            await card.lose(card.engines[0])
            card.engines[0] = Engine("a", card)
            card.find(card.engines[0])
            assert await card.request("a", 1) > 0
            assert card.swapper.num_waiting == {"a": 0, "b": 0}
            assert card.swapper.awake == {"a": True, "b": False}
            await card.request("b", 1)
        assert len(card.swapper._seats) == 2


@virtual
async def test_another_operators_wake_is_noticed_before_another_model_gets_the_card():
    async with sharing("a", "b") as card:
        await card.request("a", 1)
        await card.request("b", 1)
        card.engines[1].is_asleep, card.engines[0].is_asleep = True, False
        for engine in card.engines:
            card.swapper.note(engine)
        assert await card.request("b", 1) == pytest.approx(SLEEP_S + WAKE_S)
        assert card.engines[0].modes[-1] == "recompute"
