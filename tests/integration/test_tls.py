"""TLS and mutual TLS on both hops, with real processes and certificates made here."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.engine.v1.engine_pb2 import GetModelInfoRequest, GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.certificates import LOOPBACK, Authority, Pair, credentials, serial_of
from tests.support.forked_program import run_forked, run_octavo
from tests.support.processes import (
    ServiceProcess,
    Stack,
    free_port,
    start_engine,
    start_frontend,
)
from tests.support.waiting import until

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
DENIED = grpc.StatusCode.PERMISSION_DENIED


@dataclass
class Secured:
    """Both services with mutual TLS everywhere, and what clients need to be let in."""

    services: Stack
    folder: Path
    authority: Authority
    stranger: Authority
    client: Pair
    engine_pair: Pair
    frontend_pair: Pair
    http_port: int

    @property
    def engine(self) -> ServiceProcess:
        return self.services.engine

    @property
    def frontend(self) -> ServiceProcess:
        return self.services.frontend


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("certificates")
    authority, stranger = Authority(folder), Authority(folder, "stranger")
    engine_pair = authority.issue("engine", LOOPBACK, "engine.internal")
    frontend_pair = authority.issue("frontend", LOOPBACK, "frontend.internal")
    client = authority.issue("client", "client.internal")
    http_port = free_port()
    engine = start_engine(
        credentials=credentials(authority, client),
        tls_cert=engine_pair.cert,
        tls_key=engine_pair.key,
        tls_client_ca=authority.cert,
        tls_allowed_clients="frontend.internal",
        max_connections=8,
    )
    frontend = start_frontend(
        engine.address,
        credentials=credentials(authority, client),
        tls_cert=frontend_pair.cert,
        tls_key=frontend_pair.key,
        tls_client_ca=authority.cert,
        engine_tls_ca=authority.cert,
        engine_tls_cert=frontend_pair.cert,
        engine_tls_key=frontend_pair.key,
        http_port=http_port,
    )
    with Stack(engine, frontend) as services:
        yield Secured(
            services, folder, authority, stranger, client, engine_pair, frontend_pair, http_port
        )


@contextlib.asynccontextmanager
async def channel_to(
    service: ServiceProcess, authority: Authority | None, pair: Pair | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own: channels with the same certificates would share one."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if authority is None:
        opened = grpc.aio.insecure_channel(service.address, options=options)
    else:
        opened = grpc.aio.secure_channel(
            service.address, credentials(authority, pair), options=options
        )
    async with opened as channel:
        yield channel


def request(max_tokens: int = 4, text: str = "Once upon a time") -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(sampling=sampling))


async def finish_of(call) -> int:
    return [response.output async for response in call][-1].finish_reason


async def status_of_list_models(channel: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await FrontendServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_client_with_its_certificate_is_served_through_both_hops(secured):
    async with channel_to(secured.frontend, secured.authority, secured.client) as channel:
        call = FrontendServiceStub(channel).Generate(request())
        assert await finish_of(call) == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize("hop", ["frontend", "engine"])
@pytest.mark.parametrize("fault", ["plain text", "none", "expired", "stranger", "wrong authority"])
async def test_a_client_without_the_right_certificate_is_refused_in_the_handshake(
    secured, hop, fault
):
    service = getattr(secured, hop)
    authority: Authority | None = secured.authority
    pair: Pair | None = secured.client
    if fault == "plain text":
        authority = pair = None
    elif fault == "none":
        pair = None
    elif fault == "expired":
        pair = secured.authority.issue(f"{hop}-expired", "frontend.internal", expired=True)
    elif fault == "stranger":
        pair = secured.stranger.issue(f"{hop}-stranger", "frontend.internal")
    else:  # the client does not know who vouches for the server
        authority = secured.stranger
    async with channel_to(service, authority, pair) as channel:
        assert await status_of_list_models(channel) == UNAVAILABLE


async def test_an_engine_serves_only_frontends_of_the_names_that_it_allows(secured):
    async with channel_to(secured.engine, secured.authority, secured.client) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await EngineServiceStub(channel).GetModelInfo(GetModelInfoRequest())
        session = EngineServiceStub(channel).Session()
        with pytest.raises(grpc.aio.AioRpcError) as refused_session:
            await session.read()
    assert refused.value.code() == refused_session.value.code() == DENIED
    assert "client.internal" in refused.value.details()
    async with channel_to(secured.engine, secured.authority, secured.frontend_pair) as channel:
        assert (await EngineServiceStub(channel).GetModelInfo(GetModelInfoRequest())).model
    # The probes of `secured` show the client's certificate, and they are answered.
    await asyncio.to_thread(secured.engine.wait_ready)


async def test_http_speaks_tls_and_wants_the_same_certificates(secured):
    url = f"https://{LOOPBACK}:{secured.http_port}"
    wish = {"model": "tiny", "prompt": "Once upon", "max_tokens": 4}
    context = client_context(secured, secured.client)
    async with httpx.AsyncClient(verify=context, timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json=wish)
    assert answer.json()["choices"][0]["text"]
    stranger = secured.stranger.issue("http-stranger", "client.internal")
    for context in (client_context(secured, None), client_context(secured, stranger)):
        async with httpx.AsyncClient(verify=context, timeout=60) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{url}/health")
    async with httpx.AsyncClient(timeout=60) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(url.replace("https", "http") + "/health")


async def test_the_command_line_shows_its_certificate(secured):
    ca, client = secured.authority.cert, secured.client
    tls = ["--tls-ca", ca, "--tls-cert", client.cert, "--tls-key", client.key]
    wish = ["generate", "Once upon", "--max-tokens", "4", "--frontend", secured.frontend.address]
    assert (await octavo(*wish, *tls)).returncode == 0
    health = ("health", secured.engine.address, "--timeout-s", 60)
    assert (await octavo(*health, *tls)).returncode == 0
    anonymous = await octavo(*wish, "--tls-ca", ca)
    assert anonymous.returncode == 1
    assert "cannot connect" in anonymous.stderr
    lonely = await octavo(*wish, "--tls-cert", client.cert)
    assert "--tls-cert and --tls-key come together" in lonely.stderr


async def test_rotated_certificates_count_at_the_next_connection_and_streams_go_on(secured):
    tls = (secured.authority, secured.client)
    async with channel_to(secured.frontend, *tls) as channel:
        stream = FrontendServiceStub(channel).Generate(request(max_tokens=500))
        outputs = aiter(stream)
        await anext(outputs)
        before = secured.frontend.log.count("engine_lost")
        new_frontend = secured.authority.issue("frontend", LOOPBACK, "frontend.internal")
        new_engine = secured.authority.issue("engine", LOOPBACK, "engine.internal")
        serials = [
            await asyncio.to_thread(serial_served, secured, port)
            for port in (secured.frontend.port, secured.http_port, secured.engine.port)
        ]
        assert serials == [serial_of(new_frontend)] * 2 + [serial_of(new_engine)]
        last = [response.output async for response in outputs][-1]
        assert last.finish_reason == FinishReason.FINISH_REASON_LENGTH
    async with channel_to(secured.frontend, *tls) as channel:
        assert await status_of_list_models(channel) == grpc.StatusCode.OK
    assert secured.frontend.log.count("engine_lost") == before


async def test_files_that_do_not_fit_together_change_nothing_until_they_do(secured):
    served = serial_of(secured.frontend_pair)
    key = secured.frontend_pair.key.read_bytes()
    secured.frontend_pair.key.write_bytes(b"half a key")
    assert await asyncio.to_thread(serial_served, secured, secured.frontend.port) == served
    await until(lambda: "certificates_not_reloaded" in secured.frontend.log)
    assert "half a key" not in secured.frontend.log
    secured.frontend_pair.key.write_bytes(key)
    assert await asyncio.to_thread(serial_served, secured, secured.frontend.port) == served


async def test_connections_to_an_engine_are_limited(secured):
    # The last with `secured`: others would find connections that are not over yet.
    async with contextlib.AsyncExitStack() as stack:
        codes = []
        for _ in range(9):
            channel = await stack.enter_async_context(
                channel_to(secured.engine, secured.authority, secured.frontend_pair)
            )
            try:
                await EngineServiceStub(channel).GetStats(GetStatsRequest(), timeout=60)
            except grpc.aio.AioRpcError as error:
                codes.append(error.code())
    assert codes
    assert set(codes) == {UNAVAILABLE}


async def test_a_frontend_comes_back_to_an_engine_whose_authority_has_changed(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.cert.read_bytes())
    pair = old.issue("engine", LOOPBACK)
    engine = start_engine(
        credentials=credentials(old), tls_cert=pair.cert, tls_key=pair.key, num_kv_blocks=64
    )
    frontend = start_frontend(engine.address, engine_tls_ca=trusted)
    async with Stack(engine, frontend):
        await asyncio.to_thread(engine.stop)
        new.issue("engine", LOOPBACK)
        engine.credentials = credentials(new)
        engine.start()
        await asyncio.to_thread(engine.wait_ready)
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in frontend.log, timeout_s=30)
        assert not await asyncio.to_thread(frontend.is_serving)
        trusted.write_bytes(new.cert.read_bytes())
        await asyncio.to_thread(frontend.wait_ready)


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        ("frontend", ["--tls-cert", "CERT"], "needs both --tls-cert and --tls-key"),
        ("frontend", ["--engine-tls-cert", "CERT"], "TLS needs --engine-tls-ca"),
        ("frontend", ["--tls-cert", "CERT", "--tls-key", "nowhere"], "nowhere cannot be read"),
        ("engine", ["--tls-client-ca", "CERT"], "needs both --tls-cert and --tls-key"),
        ("engine", ["--tls-cert", "CERT", "--tls-key", "OTHER"], "KEY_VALUES_MISMATCH"),
        ("engine", ["--tls-allowed-clients", "x"], "--tls-allowed-clients needs --tls-client-ca"),
    ],
)
def test_files_that_cannot_be_used_end_the_start_with_the_reason(tmp_path, module, flags, message):
    authority = Authority(tmp_path)
    paths = {
        "CERT": str(authority.issue("server", LOOPBACK).cert),
        "OTHER": str(authority.issue("other", LOOPBACK).key),
    }
    flags = (paths.get(flag, flag) for flag in flags)
    ended = run_forked(f"services.{module}", "--port", "0", *flags)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def client_context(secured: Secured, pair: Pair | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=secured.authority.cert)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


def serial_served(secured: Secured, port: int) -> int:
    """Which certificate a new connection gets to see."""
    context = client_context(secured, secured.client)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((LOOPBACK, port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=LOOPBACK) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


async def octavo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_octavo, *arguments)
