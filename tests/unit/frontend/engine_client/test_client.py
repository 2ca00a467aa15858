"""The frontend keeps its engine, notices when it is gone, and finds it again."""

import asyncio
import contextlib
import json
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.engine_client.session import SILENCE_CHECKS
from tests.support.byte_tokenizer import CHAT_TEMPLATE, tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import FrontendStack, frontend_stack
from tests.support.loop_time import LoopTime
from tests.support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def request(**options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="one two", options=pb.GenerationOptions(**options))


async def answer(stack: FrontendStack) -> str:
    return "".join([part.output.text async for part in stack.stub.Generate(request())])


async def status_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    return caught.value.code()


async def health(stack: FrontendStack, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(stack.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def end_sessions(context) -> None:
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all 64 sessions are taken")


@contextlib.asynccontextmanager
async def restarted(engine: FakeEngine, **changes: object):
    """Another engine on the same port."""
    await engine.die()
    fresh = FakeEngine(**{"engine_id": "engine-2", **changes})
    await fresh.start(engine.port)
    yield fresh
    await fresh.die()


@pytest.mark.parametrize("has_keys", [False, True])
async def test_callers_with_keys_do_not_receive_the_addresses_of_engines(tmp_path, has_keys):
    engine = FakeEngine()
    await engine.start()
    await engine.die()
    config = {}
    if has_keys:
        config["api_keys_file"] = tmp_path / "keys.toml"
        config["api_keys_file"].write_text('[keys.alice]\nkey = "alice-0123456789"\n')
    async with frontend_stack(engine, wait_ready=False, **config) as stack:
        bearer = [("authorization", "Bearer alice-0123456789")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(request(), metadata=bearer).read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (engine.address in caught.value.details()) != has_keys


async def test_the_reason_for_no_connection_is_known():
    engine = FakeEngine()
    await engine.start()
    await engine.die()
    async with frontend_stack(engine, wait_ready=False) as stack:
        await until(lambda: "Connection refused" in str(stack.server.engine.unavailable))


async def test_another_service_at_an_engines_address_is_named():
    async with FakeEngine() as engine, frontend_stack(engine) as other:
        config = {"engine_address": other.address}
        async with frontend_stack(engine, wait_ready=False, **config) as stack:
            pool = stack.server.engine
            await until(lambda: "it is no engine of this version" in str(pool.unavailable))


async def test_callers_receive_the_engines_reason_for_refusing_a_session(monkeypatch):
    async with FakeEngine() as engine:
        monkeypatch.setattr(engine, "talk", end_sessions)
        async with frontend_stack(engine, wait_ready=False) as stack:
            await until(lambda: engine.num_asked > 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stack.stub.Generate(request()).read()
        reason = "the engine opens no session: RESOURCE_EXHAUSTED: all 64 sessions are taken"
        assert reason in caught.value.details()


async def test_a_frontend_without_engine_lives_but_is_not_ready():
    engine = FakeEngine()
    await engine.start()
    await engine.die()
    async with frontend_stack(engine, wait_ready=False) as stack:
        assert await health(stack, "liveness") == SERVING
        assert await health(stack) == NOT_SERVING
        assert await status_of(stack.stub.Generate(request())) == grpc.StatusCode.UNAVAILABLE
        await engine.start(engine.port)
        await until(lambda: stack.server.engine.is_ready)
        assert await health(stack, "octavo.frontend.v1.FrontendService") == SERVING
        assert await answer(stack) == "hello world"
        await engine.die()


async def test_readiness_follows_the_engine_and_watchers_are_notified():
    async with (
        FakeEngine(is_ready=False) as engine,
        frontend_stack(engine, wait_ready=False) as stack,
    ):
        await until(lambda: engine.num_sessions)
        watch = health_pb2_grpc.HealthStub(stack.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        engine.is_ready = True
        assert (await watch.read()).status == SERVING
        engine.is_ready = False
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_a_lost_engine_ends_its_requests_and_is_found_again():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        engine.pause()
        calls = [stack.stub.Generate(request()) for _ in range(3)]
        await until(lambda: len(engine.live) == 3)
        async with restarted(engine, script=says("hello again")) as fresh:
            for call in calls:
                assert await status_of(call) == grpc.StatusCode.UNAVAILABLE
            await until(lambda: fresh.num_sessions and stack.server.engine.is_ready)
            assert await answer(stack) == "hello again"


async def test_a_silent_engine_is_given_up_and_its_requests_end():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, engine_silence_timeout_s=60) as stack,
    ):
        engine.pause()
        call = stack.stub.Generate(request())
        await until(lambda: engine.live)
        engine.mute()
        time = LoopTime()
        while stack.server.engine.is_ready:
            time.wind(60 / SILENCE_CHECKS)
            await asyncio.sleep(0.01)
        assert await status_of(call) == grpc.StatusCode.UNAVAILABLE
        engine.unmute()
        engine.resume()
        time.wind(60)  # for the hello that never came
        await until(lambda: stack.server.engine.is_ready)
        assert await answer(stack) == "hello world"


async def test_an_engine_that_never_says_hello_is_given_up():
    engine = FakeEngine()
    engine.mute()
    async with (
        engine,
        frontend_stack(engine, wait_ready=False, engine_silence_timeout_s=60) as stack,
    ):
        time = LoopTime()
        while not re.search("hello|session", str(stack.server.engine.unavailable)):
            time.wind(60)
            await asyncio.sleep(0.01)
        engine.unmute()
        time.wind(60)  # for the hello that never came
        await until(lambda: stack.server.engine.is_ready)


async def test_a_draining_engine_finishes_but_gets_nothing_new():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        engine.pause()
        call = stack.stub.Generate(request())
        await until(lambda: engine.live)
        engine.drain()
        await until(lambda: not stack.server.engine.is_ready)
        assert await status_of(stack.stub.Generate(request())) == grpc.StatusCode.UNAVAILABLE
        assert len(engine.submits) == 1
        engine.resume()
        assert [response async for response in call][-1].output.finish_reason


async def test_a_restarted_engine_with_another_tokenizer_is_served_with_it():
    loud = tokenizer_files(chat_template=CHAT_TEMPLATE.replace("assistant", "ASSISTANT"))
    conversation = pb.TokenizeRequest(
        conversation=pb.Conversation(messages=[pb.ChatMessage(role="user", content="x")])
    )
    async with (
        FakeEngine() as engine,
        frontend_stack(engine) as stack,
        restarted(engine, files=loud, model="loud") as fresh,
    ):
        await until(lambda: fresh.num_sessions and stack.server.engine.is_ready)
        tokenized = await stack.stub.Tokenize(conversation)
        assert "ASSISTANT" in "".join(tokenized.tokens)
        [model] = (await stack.stub.ListModels(pb.ListModelsRequest())).models
        assert model.name == "loud"


async def test_every_step_read_is_credited():
    async with (
        FakeEngine(script=says("one two three four five " * 5, eos=False)) as engine,
        frontend_stack(engine) as stack,
    ):
        await answer(stack)
        await until(lambda: engine.steps_read == engine.steps_sent)
        assert engine.steps_sent > engine.credit_window


async def test_requests_of_many_clients_share_one_session():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        answers = await asyncio.gather(*[answer(stack) for _ in range(50)])
        assert answers == ["hello world"] * 50
        assert engine.num_sessions == 1
        await until(lambda: stack.server.engine.num_live == 0)


async def test_a_broken_tokenizer_is_named_to_callers():
    files = {"tokenizer.json": b"{}"}
    async with FakeEngine(files=files) as engine, frontend_stack(engine, wait_ready=False) as stack:
        await until(lambda: "cannot be read" in str(stack.server.engine.unavailable))
        assert await status_of(stack.stub.Generate(request())) == grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def tokenizer_folder(tmp_path):
    for name, content in tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"not a part of the tokenizer")
    return tmp_path


async def test_a_local_tokenizer_serves_instead_of_the_engines(tokenizer_folder):
    async with FakeEngine() as engine, frontend_stack(engine, tokenizer=tokenizer_folder) as stack:
        assert await answer(stack) == "hello world"


async def test_a_local_tokenizer_that_is_not_the_engines_is_refused(tokenizer_folder):
    config = json.loads(tokenizer_files()["tokenizer_config.json"])
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps(config | {"x": 1}))
    async with FakeEngine() as engine:
        stack_of = frontend_stack(engine, wait_ready=False, tokenizer=tokenizer_folder)
        async with stack_of as stack:
            await until(lambda: "has the hash" in str(stack.server.engine.unavailable))
            assert await health(stack) == NOT_SERVING


async def test_closing_the_frontend_leaves_no_task():
    before = asyncio.all_tasks()
    async with FakeEngine() as engine:
        async with frontend_stack(engine) as stack:
            engine.pause()
            call = stack.stub.Generate(request())
            await until(lambda: engine.live)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            [response async for response in call]
        await until(lambda: engine.num_sessions == 0)
    await until(lambda: asyncio.all_tasks() <= before)
