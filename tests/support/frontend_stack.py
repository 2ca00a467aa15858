"""A frontend in this process, in front of fake engines, with a client's stub."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import grpc
import httpx

from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.frontend.config import FrontendConfig
from services.frontend.engine_client import client
from services.frontend.pipeline.image_reading import ImageParts
from services.frontend.server import FrontendServer
from services.telemetry import metrics
from tests.support.fake_engine import FakeEngine
from tests.support.forked_helpers import helpers_forked
from tests.support.waiting import until

LONG_TIMEOUT_S = 60.0
LONG_TIMEOUTS = {
    "engine_silence_timeout_s": LONG_TIMEOUT_S,
    "http_header_timeout_s": LONG_TIMEOUT_S,
    "slow_reader_timeout_s": LONG_TIMEOUT_S,
    "template_timeout_s": LONG_TIMEOUT_S,
}
"""On a busy machine an engine or a client may be slow; it must not look lost."""


@dataclass
class FrontendStack:
    """A frontend under test, its engine and its client."""

    engine: FakeEngine
    server: FrontendServer
    channel: grpc.aio.Channel
    stub: FrontendServiceStub
    address: str

    @property
    def http_url(self) -> str:
        """Where HTTP is served, in a stack that was started with an `http_port`."""
        return f"http://127.0.0.1:{self.server.http_port}"

    def http_client(self, *, timeout_s: float = 20) -> httpx.AsyncClient:
        """Returns a client of `http_url`; enter it to close it."""
        # To load certificates of authorities takes longer than most requests.
        return httpx.AsyncClient(base_url=self.http_url, timeout=timeout_s, verify=False)


@asynccontextmanager
async def frontend_stack(
    engine: FakeEngine,
    *others: FakeEngine,
    wait_ready: bool = True,
    forks_helpers: bool = True,
    images: ImageParts | None = None,
    **config: object,
) -> AsyncIterator[FrontendStack]:
    """Starts a frontend of engines, which must be listening, and connects a client to it.

    forks_helpers: whether its helper processes are forked instead of started.
    images: the parts that read images; by default those of the configuration.
    """
    addresses = ",".join(each.address for each in (engine, *others))
    settings = {"port": 0, "engine_address": addresses, **LONG_TIMEOUTS, **config}
    server = FrontendServer(FrontendConfig(**settings), images=images)
    with (
        helpers_forked() if forks_helpers else nullcontext(),
        mock.patch.object(client, "CALL_TIMEOUT_S", LONG_TIMEOUT_S),
        mock.patch.object(metrics, "COLLECT_TIMEOUT_S", LONG_TIMEOUT_S),
    ):
        port = await server.start()
        address = f"127.0.0.1:{port}"
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = FrontendServiceStub(channel)
                if wait_ready:
                    num_ready = 1 + len(others)
                    await until(lambda: sum(e.is_ready for e in server.engine.engines) == num_ready)
                yield FrontendStack(engine, server, channel, stub, address)
        finally:
            await server.close()
