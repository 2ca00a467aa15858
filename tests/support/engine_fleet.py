"""Several real engines behind one real frontend, some of which die."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.pace import has_stopped
from tests.support.processes import Flag, ServiceProcess, start_engine, start_frontend
from tests.support.steered_engine import MODULE, stop_after


@dataclass
class EngineFleet:
    """The processes, and a client of the frontend."""

    engines: list[ServiceProcess]
    frontend: ServiceProcess
    stub: FrontendServiceStub
    stop_file: Path
    """Shared by all engines: one of their workers stops."""

    async def listing(self) -> pb.ListEnginesResponse:
        """Returns the frontend's view of its engines."""
        return await self.stub.ListEngines(pb.ListEnginesRequest())

    async def wait_for(self, condition: Callable[[pb.ListEnginesResponse], bool]) -> None:
        """Returns once the frontend's view of its engines is as wanted."""
        async with asyncio.timeout(60):
            while not condition(await self.listing()):  # noqa: ASYNC110  another process has no event
                await asyncio.sleep(0.02)

    async def wait_until_ready(self, num_engines: int) -> None:
        """Returns once `num_engines` engines take requests."""
        await self.wait_for(lambda listing: num_ready(listing) >= num_engines)

    def stop_after(self, num_tokens: int) -> None:
        """Stops the first worker that outputs more than `num_tokens` of a request."""
        stop_after(self.stop_file, num_tokens)

    async def stopped(self) -> ServiceProcess:
        """Waits until a worker has stopped, so that its requests cannot end; returns its engine."""
        async with asyncio.timeout(60):
            while not (found := [engine for engine in self.engines if has_stopped(engine)]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return found[0]


def num_ready(listing: pb.ListEnginesResponse) -> int:
    """How many engines take requests."""
    return sum(card.ready for card in listing.engines)


@contextlib.asynccontextmanager
async def engine_fleet(
    num_engines: int, *, engine: Mapping[str, Flag] | None = None, **frontend_flags: Flag
) -> AsyncIterator[EngineFleet]:
    """Starts engines and a frontend and waits until all are ready; ends them whatever happens.

    engine: flags of every engine.
    """
    folder = tempfile.TemporaryDirectory()
    stop_file = Path(folder.name) / "stop"
    engines = [
        start_engine(module=MODULE, stop_file=stop_file, num_kv_blocks=512, **(engine or {}))
        for _ in range(num_engines)
    ]
    addresses = ",".join(engine.address for engine in engines)
    frontend = start_frontend(addresses, **frontend_flags)
    try:
        for engine in engines:
            engine.start()
        async with frontend, grpc.aio.insecure_channel(frontend.address) as channel:
            fleet = EngineFleet(engines, frontend, FrontendServiceStub(channel), stop_file)
            await fleet.wait_until_ready(num_engines)
            yield fleet
    finally:
        for engine in engines:
            await asyncio.to_thread(engine.__exit__, None, None, None)
        folder.cleanup()
