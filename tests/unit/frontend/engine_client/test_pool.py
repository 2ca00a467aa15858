"""Engines join, leave, drain and come back; an engine that serves something else is not used."""

import asyncio
import contextlib

import grpc
import pytest

from protos.engine.v1.engine_pb2 import KnownAdapter
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.engine_client.addresses import AddressBook
from services.frontend.engine_client.engine_view import AdapterChange
from services.frontend.engine_client.messages import EngineRequest, SamplingParams, pack_uint32
from services.frontend.engine_client.pool import EnginePool, PoolLimits
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.engine_client.tokenizer_files import TokenizerStore
from services.frontend.errors import DeadlineExpiredError, EngineUnavailableError
from services.transport.tls import ClientTls
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import FrontendStack, frontend_stack
from tests.support.waiting import until

HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


async def ask(stack: FrontendStack) -> str:
    call = stack.stub.Generate(pb.GenerateRequest(text="one two"))
    return "".join([part.output.text async for part in call])


async def card_of(stack: FrontendStack, engine: FakeEngine) -> pb.EngineCard:
    listing = await stack.stub.ListEngines(pb.ListEnginesRequest())
    return next(card for card in listing.engines if card.address == engine.address)


class Names:
    """A name service with one name, which a test gives addresses."""

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts

    async def __call__(self, host: str) -> list[str]:
        assert host == "engines"
        return self.hosts


@contextlib.asynccontextmanager
async def pool_of(name: str, names: Names, *, tls: ClientTls | None = None):
    """A pool that resolves a name over and over, and the readiness that it was sent."""
    models, readiness = [], []

    async def take_model(info, files) -> None:
        models.append(info)

    pool = EnginePool(
        AddressBook([name], lookup=names),
        TokenizerStore(None),
        PoolLimits(silence_timeout_s=60, resolve_interval_s=0.02),
        tls=tls,
    )
    running = asyncio.create_task(pool.run(on_model=take_model, on_readiness=readiness.append))
    try:
        yield pool, models, readiness
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def cluster():
    """Three engines on one port of three hosts."""
    engines = [FakeEngine(engine_id=f"engine-{index}") for index in range(3)]
    await engines[0].start(0, HOSTS[0])
    for engine, host in zip(engines[1:], HOSTS[1:], strict=True):
        await engine.start(engines[0].port, host)
    yield engines
    for engine in engines:
        await engine.die()


async def collect(pool: EnginePool, models: list, **fields: object) -> list[int]:
    stream = TokenStream(
        pool,
        EngineRequest(request_id="r", prompt_token_ids=pack_uint32([5, 6, 7]), **fields),
        model=models[-1],
    )
    tokens: list[int] = []
    while True:
        batch = await stream.read()
        tokens += batch.token_ids
        if batch.finish_reason is not None:
            return tokens


class TestNames:
    async def test_engines_join_and_leave_as_the_name_says(self, cluster):
        names = Names(HOSTS[:1])
        async with pool_of(f"engines:{cluster[0].port}", names) as (pool, models, readiness):
            await until(lambda: pool.is_ready)
            names.hosts = HOSTS
            await until(lambda: sum(engine.is_ready for engine in pool.engines) == 3)
            names.hosts = HOSTS[2:]
            await until(lambda: len(pool.engines) == 1)
            assert await collect(pool, models)
            assert [len(engine.submits) for engine in cluster] == [0, 0, 1]
            assert readiness == [True]

    async def test_certificates_are_held_against_the_name_that_was_resolved(self, tmp_path):
        authority = Authority(tmp_path)
        pair = authority.issue("engine", "engines")  # and no word of 127.0.0.1
        chain = [(pair.key.read_bytes(), pair.cert.read_bytes())]
        tls = ClientTls.from_settings(ca=authority.cert, cert=None, key=None, prefix="--engine-tls")
        async with FakeEngine(credentials=grpc.ssl_server_credentials(chain)) as engine:
            name = f"engines:{engine.port}"
            async with pool_of(name, Names(HOSTS[:1]), tls=tls) as (pool, _, _):
                await until(lambda: pool.is_ready)

    async def test_an_engine_that_leaves_finishes_what_it_has(self, cluster):
        names = Names(HOSTS[:1])
        async with pool_of(f"engines:{cluster[0].port}", names) as (pool, models, _):
            await until(lambda: pool.is_ready)
            cluster[0].pause()
            running = asyncio.create_task(collect(pool, models))
            await until(lambda: cluster[0].live)
            names.hosts = HOSTS[1:2]
            await until(lambda: pool.is_ready and pool.engines[0].is_leaving)
            assert await collect(pool, models)
            assert len(cluster[0].submits) == 1
            cluster[0].resume()
            assert await running
            await until(lambda: len(pool.engines) == 1)
            assert pool.counts.num_migrations == 0

    async def test_an_engine_that_comes_back_while_it_leaves_stays(self, cluster):
        names = Names(HOSTS[:1])
        async with pool_of(f"engines:{cluster[0].port}", names) as (pool, models, _):
            await until(lambda: pool.is_ready)
            cluster[0].pause()
            running = asyncio.create_task(collect(pool, models))
            await until(lambda: cluster[0].live)
            names.hosts = []
            await until(lambda: not pool.is_ready)
            with pytest.raises(EngineUnavailableError, match="its address is gone"):
                TokenStream(
                    pool,
                    EngineRequest(request_id="s", prompt_token_ids=pack_uint32([1])),
                    model=models[-1],
                )
            names.hosts = HOSTS[:1]
            await until(lambda: pool.is_ready)
            cluster[0].resume()
            assert await running


@contextlib.asynccontextmanager
async def one_after_the_other(first: FakeEngine, second: FakeEngine):
    """A frontend of both, whose second engine answers only when the first one is connected."""
    async with first:
        async with second:  # to have a port
            pass
        async with frontend_stack(first, second, wait_ready=False) as stack:
            await until(lambda: stack.server.engine.is_ready)
            await second.start(second.port)
            await until(lambda: second.num_asked)
            outside = ("UNAVAILABLE", "not answered")
            engine = stack.server.engine.engines[1]
            await until(lambda: not any(word in engine.reason for word in outside))
            yield stack
            await second.die()


class TestOtherModels:
    @pytest.mark.parametrize(
        ("difference", "reason"),
        [
            ({"model": "other"}, "its model is 'other', theirs is 'fake'"),
            ({"config_sha256": "d" * 64}, "its config_sha256"),
            ({"files": {"tokenizer.json": b"{}"}}, "its tokenizer_sha256"),
            ({"max_model_len": 256}, "its max_model_len is 256, theirs is 512"),
        ],
    )
    async def test_an_engine_with_another_model_is_refused_and_shown(self, difference, reason):
        engine, other = FakeEngine(), FakeEngine(engine_id="engine-2", **difference)
        async with one_after_the_other(engine, other) as stack:
            card = await card_of(stack, other)
            assert not card.ready
            assert reason in card.reason
            for _ in range(3):
                assert await ask(stack) == "hello world"
            assert not other.submits

    async def test_a_new_model_is_served_once_the_last_engine_of_the_old_one_is_gone(self):
        old, new = FakeEngine(), FakeEngine(engine_id="engine-2", model="new")
        async with one_after_the_other(old, new) as stack:
            await old.die()
            await until(lambda: stack.server.engine.engines[1].is_ready)
            [model] = (await stack.stub.ListModels(pb.ListModelsRequest())).models
            assert model.name == "new"
            assert await ask(stack) == "hello world"

    async def test_one_engine_under_two_addresses_is_used_once(self):
        engine, double = FakeEngine(), FakeEngine()
        async with one_after_the_other(engine, double) as stack:
            assert f"it is the engine at {engine.address}" in (await card_of(stack, double)).reason


async def test_a_draining_engine_finishes_while_another_serves_and_comes_back():
    first, second = FakeEngine(), FakeEngine(engine_id="engine-2")
    async with first, second, frontend_stack(first, second) as stack:
        first.pause()
        second.pause()
        running = [asyncio.create_task(ask(stack))]
        # A heartbeat that crosses a request on its way does not count it; wait for one that does.
        await until(lambda: any(e.view.heartbeat.num_running for e in stack.server.engine.engines))
        running.append(asyncio.create_task(ask(stack)))
        await until(lambda: first.live and second.live)
        first.drain()
        await until(lambda: not stack.server.engine.engines[0].is_ready)
        assert stack.server.engine.is_ready
        assert "draining" in (await card_of(stack, first)).reason
        first.resume()
        second.resume()
        assert await asyncio.gather(*running) == ["hello world"] * 2
        assert await ask(stack) == "hello world"
        assert (len(first.submits), len(second.submits)) == (1, 2)
        await first.die()
        async with contextlib.AsyncExitStack() as cleanup:
            fresh = FakeEngine(engine_id="engine-3")
            await fresh.start(first.port)
            cleanup.push_async_callback(fresh.die)
            await until(lambda: stack.server.engine.engines[0].is_ready)


async def test_readiness_lasts_as_long_as_one_engine():
    first, second = FakeEngine(), FakeEngine(engine_id="engine-2")
    async with first, second, frontend_stack(first, second) as stack:
        await first.die()
        await until(lambda: not stack.server.engine.engines[0].is_ready)
        assert stack.server.engine.is_ready
        assert await ask(stack) == "hello world"


async def test_a_request_whose_time_is_over_is_not_sent(cluster):
    names = Names(HOSTS[:1])
    async with pool_of(f"engines:{cluster[0].port}", names) as (pool, models, _):
        await until(lambda: pool.is_ready)
        with pytest.raises(DeadlineExpiredError):
            await collect(pool, models, deadline_s=0.0)
        assert not cluster[0].submits


async def test_a_callers_seed_is_kept(cluster):
    names = Names(HOSTS[:1])
    async with pool_of(f"engines:{cluster[0].port}", names) as (pool, models, _):
        await until(lambda: pool.is_ready)
        sampling = SamplingParams(seed=0, temperature=1)
        await collect(pool, models, sampling=sampling)
        assert cluster[0].submits[0].sampling == sampling


async def refusals(stack: FrontendStack, *models: str) -> list[grpc.StatusCode]:
    codes = []
    for name in models:
        call = stack.stub.Generate(pb.GenerateRequest(text="one", options={"model": name}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        codes.append(caught.value.code())
    return codes


async def test_an_adapter_is_known_while_its_engine_takes_no_requests():
    engine = FakeEngine()
    async with engine, frontend_stack(engine) as stack:
        pool = stack.server.engine
        change = AdapterChange("sql", KnownAdapter(name="sql", digest=b"d"), 1)
        pool.engines[0].view.note(change)
        engine.drain()
        await until(lambda: not pool.is_ready)
        codes = await refusals(stack, "sql", "other")
    assert codes == [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND]


async def test_no_name_is_unknown_while_no_engine_says_which_adapters_it_has():
    engine = FakeEngine()
    async with engine, frontend_stack(engine) as stack:
        pool, names = stack.server.engine, ("fake", "sql", "")
        assert await refusals(stack, "sql") == [grpc.StatusCode.NOT_FOUND]
        await engine.die()
        await until(lambda: not pool.engines[0].is_connected)
        assert await refusals(stack, *names) == 3 * [grpc.StatusCode.UNAVAILABLE]
        # It is back, and has yet to read its adapters.
        engine.is_ready = False
        await engine.start(engine.port)
        await until(lambda: pool.engines[0].is_connected)
        assert await refusals(stack, *names) == 3 * [grpc.StatusCode.UNAVAILABLE]
