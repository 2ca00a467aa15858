"""One start of all ranks of an engine, from no process to ranks that take steps."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.config.engine_config import EngineConfig
from services.engine.config.parallel import LOOPBACK_INTERFACE
from services.engine.patch_memory import PatchMemory
from services.engine.worker.environment import worker_environment
from services.engine.worker.loss_cause import CAUSE_GRACE_S, cause_among
from services.engine.worker.meeting import Meeting, interface_address
from services.engine.worker.rank_process import LostPeerError, WorkerDiedError
from services.engine.worker.remote_ranks import JoinedNodes, Rank, RemoteRank
from services.processes.private_folder import ExposedFolderError


class RankStart:
    """A start of ranks: `connect`, then `spawn`, then `wait_until_ready`."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: Sequence[Rank],
        nodes: JoinedNodes | None,
        temporary: Path,
        on_progress: Callable[[str], None],
        patches: PatchMemory | None,
    ) -> None:
        """Prepares a start.

        Args:
            config: the engine's.
            ranks: all, in order; none is started.
            nodes: the other hosts; None where there is one host.
            temporary: private folder for the ranks' sockets and temporary files.
            on_progress: called with each stage of the start.
            patches: memory that the ranks of this host inherit, if there is some.
        """
        self._config = config
        self._ranks = ranks
        self._nodes = nodes
        self._temporary = temporary
        self._on_progress = on_progress
        self._patches = patches
        self._readies: dict[int, WorkerReady] = {}

    async def connect(self) -> None:
        """Waits for the other hosts, if there are any.

        Raises:
            WorkerDiedError: some did not join in time, or could not meet this one.
        """
        if self._nodes is None:
            return
        try:
            interface_address(self._interface)
        except ValueError as error:
            raise WorkerDiedError(str(error)) from None
        limit_s = self._config.worker.worker_start_timeout_s
        links = await self._nodes.wait_for_all(limit_s, self._on_progress)
        for each in self._ranks:
            if isinstance(each, RemoteRank):
                each.connect(links[each.node - 1])

    async def spawn(self) -> None:
        """Starts the processes and connects to them.

        Raises:
            WorkerDiedError: the network interface for several hosts has no address, or another user
                can change code that the ranks would load.
        """
        config = self._config.model_dump_json()
        try:
            environment = worker_environment(self._config, self._interface, self._temporary)
        except ExposedFolderError as error:
            raise WorkerDiedError(str(error)) from None
        meeting = self._open_meeting()
        try:
            for number, each in enumerate(self._ranks):
                if isinstance(each, RemoteRank):
                    each.start(config=config, meeting_address=meeting.address)
                    continue
                arguments = ["--rank", str(number), "--config", config, *meeting.arguments]
                fds = [] if meeting.fd is None else [meeting.fd]
                if self._patches is not None:
                    arguments += ["--patches-fd", str(self._patches.fd)]
                    fds.append(self._patches.fd)
                await each.spawn(arguments, environment=environment, fds=fds)
        finally:
            meeting.close()

    async def wait_until_ready(self) -> None:
        """Waits until all ranks take steps.

        Raises:
            WorkerDiedError: one could not start; the message says why.
        """
        if len(self._ranks) == 1:
            await self._follow(0)
            return
        numbers = range(len(self._ranks))
        following = [asyncio.create_task(self._follow(number)) for number in numbers]
        try:
            done, others = await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
            errors = _errors_of(done)
            if errors and others and all(isinstance(each, LostPeerError) for each in errors):
                done, _ = await asyncio.wait(others, timeout=CAUSE_GRACE_S)
                errors += _errors_of(done)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        if errors:
            raise cause_among(errors)

    def announcement(self, number: int) -> WorkerReady:
        """Returns what a rank announced when it was ready, with the facts of all ranks."""
        ready = self._readies[number]
        infos = [info for _, each in sorted(self._readies.items()) for info in each.ranks]
        del ready.ranks[:]
        ready.ranks.extend(infos)
        return ready

    def describe_late(self) -> str:
        """Returns the names of the ranks that are not ready, with the last stage of each."""
        late = (each for number, each in enumerate(self._ranks) if number not in self._readies)
        return "; ".join(
            f"{each.name} (last seen {each.stage})" if each.stage else each.name for each in late
        )

    @property
    def _interface(self) -> str:
        has_nodes = self._nodes is not None
        return self._config.parallel.node_interface if has_nodes else LOOPBACK_INTERFACE

    def _open_meeting(self) -> Meeting:
        """Opens the place where the ranks meet."""
        if self._nodes is not None:
            try:
                return Meeting.on_interface(self._interface)
            except ValueError as error:
                raise WorkerDiedError(str(error)) from None
        return Meeting() if len(self._ranks) == 1 else Meeting.in_memory()

    async def _follow(self, number: int) -> None:
        """Follows the start of a rank until it announces that it is ready."""
        rank = self._ranks[number]
        prefix = f"{rank.name}: " if len(self._ranks) > 1 else ""
        while True:
            event = await rank.next_event()
            kind = event.WhichOneof("event")
            if kind == "ready":
                self._readies[number] = event.ready
                return
            if kind != "progress":
                raise WorkerDiedError(f"{rank.name} sent {kind} before it was ready")
            rank.stage = event.progress.stage
            self._on_progress(prefix + rank.stage)


def _errors_of(tasks: set[asyncio.Task[None]]) -> list[WorkerDiedError]:
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, WorkerDiedError):
            raise error
    return [error for error in errors if isinstance(error, WorkerDiedError)]
