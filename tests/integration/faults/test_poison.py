"""A request that breaks the model, or kills its worker: it ends, and others go on."""

import asyncio

import grpc
import pytest

from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, until_live
from tests.support.poisoned_checkpoint import POISON, write_poisoned_checkpoint
from tests.support.processes import start_engine
from tests.support.steered_engine import DEADLY, MODULE

PROMPT = [5, 6, 7, 8]
KILLER = [DEADLY, *PROMPT]


async def read_all(call) -> list[int]:
    token_ids: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        token_ids += response.token_ids
    return token_ids


async def assert_fails(call) -> None:
    """Reads a call that must end with INTERNAL and reveal nothing but an id."""
    with pytest.raises(grpc.aio.AioRpcError, match=r"internal error [0-9a-f]{12}") as caught:
        await read_all(call)
    assert caught.value.code() == grpc.StatusCode.INTERNAL


@pytest.fixture(scope="module")
def poisonable(tmp_path_factory):
    model = write_poisoned_checkpoint(tmp_path_factory.mktemp("poisoned") / "tiny")
    # So few blocks that another request soon gets the blocks of the poisonous one.
    with start_engine(model=model, num_kv_blocks=16, max_num_batched_tokens=32) as process:
        yield process


class TestNaN:
    @pytest.mark.parametrize(
        "sampling",
        [
            {},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 0.7, "seed": 3, "top_k": 5, "logprobs": 3},
            {"repetition_penalty": 1.2},
        ],
        ids=str,
    )
    async def test_ends_its_request_alone_and_leaves_clean_blocks(self, poisonable, sampling):
        baseline = await held_by(poisonable)
        async with engine_stub(poisonable.address) as stub:
            before = await get_stats(stub)
            expected = await generate(stub, PROMPT, max_tokens=80, ignore_eos=True)
            beside = asyncio.create_task(generate(stub, PROMPT, max_tokens=80, ignore_eos=True))
            for where in (3, 20, 40):
                poisoned = [9 + i % 50 for i in range(40)]
                poisoned.insert(where, POISON)
                await assert_fails(begin(stub, poisoned, max_tokens=20, **sampling))
            assert await beside == expected
            assert await generate(stub, PROMPT, max_tokens=80, ignore_eos=True) == expected
            after = await get_stats(stub)
        assert after.num_worker_restarts == 0
        assert after.finished["failed"] - before.finished["failed"] == 3
        await assert_all_is_given_back(poisonable, baseline)


class TestWorkerKiller:
    async def test_ends_after_its_second_victim_and_is_refused_then(self):
        async with (
            start_engine(
                module=MODULE,
                kv_cache_memory_mb=64,
                worker_patience_s=300,
            ) as engine,
            engine_stub(engine.address) as stub,
        ):
            baseline = await held_by(engine)
            expected = await read_all(begin(stub, PROMPT, max_tokens=40, ignore_eos=True))
            with frozen(worker_of(engine)):
                beside = begin(stub, PROMPT, max_tokens=40, ignore_eos=True)
                await until_live(engine, 1)
                killer = begin(stub, KILLER, max_tokens=20)
                await until_live(engine, 2)
            await assert_fails(killer)
            assert await read_all(beside) == expected
            assert '"num_suspects": 2' in engine.log
            await assert_fails(begin(stub, KILLER, max_tokens=20))
            stats = await get_stats(stub)
            assert stats.num_worker_restarts == 2
            assert stats.rejected["INTERNAL"] == 1
            await assert_all_is_given_back(engine, baseline)
