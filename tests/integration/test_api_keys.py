"""API keys at a real frontend, over gRPC and HTTP: who is let in, and how much they may use."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.errors import OverloadedError, UnauthenticatedError
from services.client.requests import Options, Sampling
from services.transport.status import RETRY_PUSHBACK
from tests.support.held import worker_of
from tests.support.pace import frozen, stopped, together, until_live
from tests.support.processes import ROOT, Stack, free_port, start_engine, start_frontend
from tests.support.steered_engine import MODULE, stop_after
from tests.support.waiting import until

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
ROOMY, NARROW, FLEETING, METERED = (
    f"octavo-{name}-0123456789abcdef" for name in ("roomy", "narrow", "fleeting", "metered")
)
KEYS = {
    "roomy": f'key = "{ROOMY}"\nmay_list_engines = true',
    "narrow": f'key = "{NARROW}"\nmax_live_requests = 1',
    "fleeting": f'key = "{FLEETING}"',
    "metered": f'key = "{METERED}"\ntokens_per_minute = 10',
}
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


@dataclass
class Guarded:
    """Both services, the frontend with keys."""

    services: Stack
    key_file: Path
    url: str

    @property
    def frontend(self):
        return self.services.frontend

    @property
    def address(self) -> str:
        return self.services.frontend.address

    def set_keys(self, *names: str) -> None:
        fresh = self.key_file.with_suffix(".new")
        fresh.write_text("".join(f"[keys.{name}]\n{KEYS[name]}\n" for name in names))
        fresh.replace(self.key_file)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, stop_file: Path) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("".join(f"[keys.{name}]\n{text}\n" for name, text in KEYS.items()))
    port = free_port()
    engine = start_engine(module=MODULE, stop_file=stop_file, max_num_seqs=4)
    frontend = start_frontend(engine.address, api_keys_file=path, http_port=port, log_level="debug")
    with Stack(engine, frontend) as services:
        yield Guarded(services, path, f"http://127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def stub_of(guarded: Guarded) -> AsyncIterator[FrontendServiceStub]:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        yield FrontendServiceStub(channel)


def http_client(guarded: Guarded) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=guarded.url, timeout=60)


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def request(sampling: SamplingParams = LONG) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Once upon", options=pb.GenerationOptions(sampling=sampling))


def calls_of(stub: FrontendServiceStub, **metadata):
    return {
        "Generate": stub.Generate(request(), **metadata).read,
        "Chat": stub.Chat(pb.ChatRequest(), **metadata).read,
        "Session": stub.Session(**metadata).read,
        "Tokenize": lambda: stub.Tokenize(pb.TokenizeRequest(text="x"), **metadata),
        "Detokenize": lambda: stub.Detokenize(pb.DetokenizeRequest(), **metadata),
        "ListModels": lambda: stub.ListModels(pb.ListModelsRequest(), **metadata),
        "ListEngines": lambda: stub.ListEngines(pb.ListEnginesRequest(), **metadata),
    }


async def read_on(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("key", [None, "wrong-0123456789abcdef", ROOMY + "x"])
async def test_no_method_of_grpc_answers_without_a_known_key(guarded, key):
    metadata = {} if key is None else {"metadata": bearer(key)}
    async with stub_of(guarded) as stub:
        for name, call in calls_of(stub, **metadata).items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call()
            assert refused.value.code() == UNAUTHENTICATED, name


async def test_only_a_key_that_may_list_engines_receives_their_addresses(guarded):
    async with stub_of(guarded) as stub:
        listing = await stub.ListEngines(pb.ListEnginesRequest(), metadata=bearer(ROOMY))
        assert [each.address for each in listing.engines] == [guarded.services.engine.address]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListEngines(pb.ListEnginesRequest(), metadata=bearer(NARROW))
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert guarded.services.engine.address not in refused.value.details()


async def test_reflection_needs_a_key_and_health_does_not(guarded):
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        wish = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            # Without a message: one that is written as the refusal comes ends in gRPC's own error.
            await stub.ServerReflectionInfo().read()
        told = await stub.ServerReflectionInfo(iter([wish]), metadata=bearer(ROOMY)).read()
    assert refused.value.code() == UNAUTHENTICATED
    assert told.list_services_response.service
    await asyncio.to_thread(guarded.frontend.wait_ready)


async def test_http_wants_a_key_everywhere_but_for_its_health(guarded):
    async with http_client(guarded) as client:
        assert (await client.get("/health")).status_code == 200
        for path in ("/v1/models", "/metrics", "/nowhere", "/v1/models/%2e%2e/health"):
            answer = await client.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        wrong = await client.post(
            "/v1/completions", json={}, headers={"authorization": f"Basic {ROOMY}"}
        )
        assert wrong.status_code == 401
        right = await client.get("/v1/models", headers=dict(bearer(ROOMY)))
    assert right.status_code == 200
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-key") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=ROOMY) as friend:
        answer = friend.completions.create(model="tiny", prompt="Once", max_tokens=2)
    assert answer.usage.completion_tokens == 2


async def test_our_client_and_command_line_show_their_keys(guarded, tmp_path):
    options = Options(sampling=Sampling(max_tokens=2))
    async with OctavoClient(guarded.address, access=Access(api_key=ROOMY)) as client:
        assert [chunk async for chunk in client.generate("Once", options)]
        assert await client.tokenize("x")
        assert await client.list_models()
        async with client.session() as session:
            assert [chunk async for chunk in session.generate("Once", options)]
    async with OctavoClient(guarded.address) as client:
        with pytest.raises(UnauthenticatedError):
            await client.list_models()
    file = tmp_path / "key"
    file.write_text(ROOMY + "\n")
    for flags, status in ((["--api-key-file", str(file)], 0), ([], 1)):
        command = ["generate", "Once", "--max-tokens", "2", "--frontend", guarded.address, *flags]
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "services.client.cli", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == status, ended.stderr


async def test_concurrent_requests_of_a_key_are_limited_over_every_protocol(guarded):
    async with stub_of(guarded) as stub:
        session = stub.Session(metadata=bearer(NARROW))
        with frozen(worker_of(guarded.services.engine)):  # its request cannot end meanwhile
            await session.write(pb.SessionRequest(handle=1, generate=request()))
            await until_live(guarded.services.engine, 1)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(request(), metadata=bearer(NARROW)).read()
            async with http_client(guarded) as client:
                answer = await client.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": "x"},
                    headers=dict(bearer(NARROW)),
                )
        assert refused.value.code() == EXHAUSTED
        assert "'narrow' has 1 unfinished requests; its limit is 1" in refused.value.details()
        assert int(dict(refused.value.trailing_metadata())[RETRY_PUSHBACK]) > 0
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        roomy = stub.Generate(request(SamplingParams(max_tokens=1)), metadata=bearer(ROOMY))
        assert (await roomy.read()).output.token_ids
        await session.write(pb.SessionRequest(handle=1, cancel=pb.Cancel()))
        while not (await session.read()).output.finish_reason:
            pass
        again = stub.Generate(request(SamplingParams(max_tokens=1)), metadata=bearer(NARROW))
        assert (await again.read()).output.token_ids
        session.cancel()
    await until_live(guarded.services.engine, 0)


async def test_prompt_and_output_tokens_use_up_the_minute(guarded):
    options = Options(sampling=Sampling(max_tokens=200, ignore_eos=True))
    async with OctavoClient(guarded.address, access=Access(api_key=METERED)) as client:
        chunks = [chunk async for chunk in client.generate("Once upon a time", options)]
        assert sum(len(chunk.token_ids) for chunk in chunks) == 200  # what runs is not cut
        with pytest.raises(OverloadedError, match="10 tokens per minute") as refused:
            async for _ in client.generate("Once", options):
                pass
        # Some 195 tokens of debt at 10 a minute, less what has come back meanwhile.
        assert 600 < refused.value.retry_after_s < 1200
        assert await client.tokenize("what costs no step is free")
    async with http_client(guarded) as http:
        answer = await http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "x"},
            headers=dict(bearer(METERED)),
        )
    assert answer.status_code == 429
    assert 600 <= int(answer.headers["retry-after"]) <= 1200
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_removed_key_ends_its_streams_and_no_others(guarded, stop_file):
    engine = guarded.services.engine
    async with stub_of(guarded) as stub, http_client(guarded) as client:
        wish = {
            "model": "tiny", "prompt": "x", "stream": True, "max_tokens": 1900, "ignore_eos": True,
        }  # fmt: skip
        events_of_wish = client.stream(
            "POST", "/v1/completions", json=wish, headers=dict(bearer(FLEETING))
        )
        session = stub.Session(metadata=bearer(FLEETING))
        async with contextlib.AsyncExitStack() as opened:
            stop_after(stop_file, 50)
            async with together(engine, 4):
                call = stub.Generate(request(), metadata=bearer(FLEETING))
                await session.write(pb.SessionRequest(handle=7, generate=request()))
                bystander = stub.Generate(request(), metadata=bearer(ROOMY))
                events = await opened.enter_async_context(events_of_wish)
            async with stopped(engine):  # all four are in the middle of their output
                for started in (call, session, bystander):
                    await started.read()
                guarded.set_keys("roomy", "narrow", "metered")
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await read_on(call)
                lines = [line async for line in events.aiter_lines() if line]
        assert ended.value.code() == UNAUTHENTICATED
        assert "invalid_api_key" in lines[-1]
        while not (last := await session.read()).HasField("failure"):
            pass
        assert last.failure.code == UNAUTHENTICATED.value[0]
        # The session stays open, and takes nothing more.
        await session.write(pb.SessionRequest(handle=8, generate=request()))
        assert (await session.read()).failure.code == UNAUTHENTICATED.value[0]
        session.cancel()
        assert (await bystander.read()).output.token_ids
        bystander.cancel()
    await until_live(engine, 0)
    guarded.set_keys(*KEYS)
    await until(lambda: guarded.frontend.log.count("api_keys_loaded") >= 3)


def test_a_key_file_that_is_wrong_ends_the_start_without_showing_it(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "{ROOMY}"\nlimit = "{ROOMY}"\n')
    command = [sys.executable, "-m", "services.frontend", "--port", "0", "--api-keys-file", path]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "keys.alice.limit" in ended.stderr
    assert ROOMY not in ended.stderr
