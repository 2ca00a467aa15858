"""The ranks that run on a node, for one stream to the head."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import structlog
from pydantic import ValidationError

from protos.engine.v1.node_pb2 import HeadMessage, NodeMessage, RankEnd, RankEvent, RankStart
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.environment import worker_environment
from services.engine.worker.meeting import Meeting
from services.engine.worker.rank_process import RankProcess, WorkerDiedError, WorkerKilledError
from services.processes.private_folder import ExposedFolderError, temporary_folder
from services.settings.installation import MissingExtraError

log = structlog.get_logger()

Write = Callable[[NodeMessage], Awaitable[None]]


class HostedRanks:
    """Starts ranks, passes on their commands and events, and ends them."""

    def __init__(self, node: int, interface: str, write: Write) -> None:
        """Starts without ranks.

        Args:
            node: this host's number.
            interface: on which the ranks meet others.
            write: sends a message to the head.
        """
        self._node = node
        self._interface = interface
        self._write = write
        self._ranks: dict[int, RankProcess] = {}
        self._relays: list[asyncio.Task[None]] = []
        self._temporary: TemporaryDirectory[str] | None = None

    async def obey(self, message: HeadMessage) -> None:
        """Does what the head orders; a rank that was not started has no commands."""
        kind = message.WhichOneof("message")
        if kind == "start":
            await self._start(message.start)
        elif kind == "command" and message.command.rank in self._ranks:
            self._ranks[message.command.rank].send(message.command.command)
        elif kind == "show_stacks" and message.show_stacks.rank in self._ranks:
            self._ranks[message.show_stacks.rank].show_stacks()

    async def stop(self) -> None:
        """Ends all ranks, by force if they do not end by themselves."""
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        try:
            await asyncio.gather(*(each.stop() for each in self._ranks.values()))
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
        if self._ranks:
            log.info("ranks_stopped", ranks=sorted(self._ranks))

    async def _start(self, order: RankStart) -> None:
        """Starts a rank's process."""
        rank = RankProcess(f"rank {order.rank} on node {self._node}")
        meeting = Meeting(address=order.meeting_address)
        try:
            config = EngineConfig.model_validate_json(order.config)
            if self._temporary is None:
                self._temporary = temporary_folder()
            environment = worker_environment(config, self._interface, Path(self._temporary.name))
            await rank.spawn(
                ["--rank", str(order.rank), "--config", order.config, *meeting.arguments],
                environment=environment,
            )
        except (ValidationError, MissingExtraError, ExposedFolderError, OSError) as error:
            reason = f"{rank.name} could not be started: {error}"
            log.warning("rank_not_started", rank=order.rank, error=str(error))
            await self._write(NodeMessage(end=RankEnd(rank=order.rank, error=reason)))
            return
        log.info("rank_started", rank=order.rank, worker_pid=rank.pid)
        self._ranks[order.rank] = rank
        self._relays.append(asyncio.create_task(self._relay(order.rank, rank)))

    async def _relay(self, number: int, rank: RankProcess) -> None:
        """Passes on a rank's events until its end, and that."""
        try:
            while True:
                event = RankEvent(rank=number, event=await rank.next_message())
                await self._write(NodeMessage(event=event))
        except WorkerDiedError as error:
            end = RankEnd(
                rank=number, error=str(error), was_killed=isinstance(error, WorkerKilledError)
            )
            log.info("rank_ended", rank=number, reason=str(error))
            await self._write(NodeMessage(end=end))
        except (grpc.RpcError, asyncio.InvalidStateError):
            log.debug("event_not_sent", rank=number)  # the stream is over, which its reader sees
