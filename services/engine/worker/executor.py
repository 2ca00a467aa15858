"""The service's end of the workers: starts all ranks, orders steps, takes results. No torch here.

Every rank gets the same commands in the same order, and does in this order whatever communicates
with the others. One rank sends the results, the reporter: the first of the last pipeline stage. The
others speak up only if something is wrong. Data-parallel ranks have steps of their own: all their
processes get their part of a step, and the first one of each sends its result.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from protos.engine.v1.worker_pb2 import (
    CompileReport,
    DiskReport,
    ExpertLoad,
    ExpertLoadOrder,
    ExpertPlacement,
    GraphOrder,
    GraphReport,
    ProfileReport,
    ProfileStart,
    ProfileStarted,
    ProfileStop,
    Recompilation,
    WorkerCommand,
    WorkerEvent,
    WorkerReady,
)
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.config.engine_config import EngineConfig
from services.engine.patch_memory import PatchMemory
from services.engine.worker.adapter_orders import AdapterOrders
from services.engine.worker.failure_agreement import FailureAgreement
from services.engine.worker.placement import RankPlace, rank_places, reporting_ranks
from services.engine.worker.rank_events import RankEvents
from services.engine.worker.rank_orders import RankOrders
from services.engine.worker.rank_process import RankProcess, WorkerDiedError
from services.engine.worker.rank_start import RankStart
from services.engine.worker.remote_ranks import JoinedNodes, Rank, RemoteRank
from services.processes.private_folder import ExposedFolderError, temporary_folder

STACKS_GRACE_S = 0.5
"""Time a worker has to show its stacks before it is ended."""

_NEWS = ("graph", "recompilation", "compiled", "expert_load", "disk")
"""Events that `receive` returns beside results."""

ProfileAnswer = Callable[[ProfileStarted | ProfileReport], None]
"""Takes a worker's word that a profile has begun or ended."""


class WorkerExecutor:
    """The worker processes of one engine, one of each rank at a time.

    `start`, then `send` and `receive`, then `stop`; after that it may be started again.
    """

    def __init__(
        self,
        config: EngineConfig,
        nodes: JoinedNodes | None = None,
        patches: PatchMemory | None = None,
    ) -> None:
        """Prepares a start.

        Args:
            config: the engine's.
            nodes: the other hosts; None where there is one host.
            patches: memory that steps name, which all ranks inherit; None if steps name none.
        """
        self._config = config
        self._nodes = nodes
        self._patches = patches
        places = rank_places(config.parallel)
        self._ranks = [_rank_at(place, len(places)) for place in places]
        reporters = reporting_ranks(config.parallel)
        self._reporter = reporters[0]
        self._events = RankEvents(self._ranks, reporters, self._take_aside)
        self._failures = FailureAgreement(config, self._ranks)
        self._due: dict[int, GraphOrder] = {}
        self.adapters = AdapterOrders(len(places), self._command)
        self.orders = RankOrders(len(places), self._command)
        self._answer_profile: ProfileAnswer = lambda answer: None
        self._temporary: TemporaryDirectory[str] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of rank 0 while it lives."""
        return self._ranks[0].pid

    def apply_weights(self, folders: Sequence[Path]) -> None:
        """Has the next start load checkpoints over the model's weights, in order."""
        self._config = self._config.with_flags(apply_weights=list(folders))

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts all ranks and waits until they take steps.

        Args:
            on_progress: called with each stage of the start.

        Raises:
            WorkerDiedError: one could not start, or not in time; the message says why. No process
                is left behind.
        """
        try:
            self._temporary = temporary_folder()
        except ExposedFolderError as error:
            raise WorkerDiedError(f"TMPDIR: {error}") from None
        starting = RankStart(
            self._config,
            self._ranks,
            self._nodes,
            Path(self._temporary.name),
            on_progress or (lambda stage: None),
            self._patches,
        )
        limit_s = self._config.worker.worker_start_timeout_s
        try:
            await starting.connect()
            async with asyncio.timeout(limit_s):
                await starting.spawn()
                await starting.wait_until_ready()
        except TimeoutError:
            await self.show_stacks()
            await self.stop()
            late = starting.describe_late()
            raise WorkerDiedError(f"{late} was not ready within {limit_s} s") from None
        except BaseException:
            await self.stop()
            raise
        self._events.open()
        return starting.announcement(self._reporter)

    def send(self, descriptor: BatchDescriptor, *others: BatchDescriptor) -> None:
        """Orders a step. Never blocks; a worker that is gone shows in `receive`.

        Args:
            descriptor: the order, of the first data-parallel rank if there are several. Each has
                equally many processes, which all get its order.
            others: those of the others, in order.
        """
        size = len(self._ranks) // (1 + len(others))
        for number, each in enumerate((descriptor, *others)):
            command = WorkerCommand(step=each.SerializeToString()).SerializeToString()
            for rank in self._ranks[number * size : (number + 1) * size]:
                rank.send(command)

    def order_profile(self, order: ProfileStart | ProfileStop, answer: ProfileAnswer) -> None:
        """Orders the start or end of a profile of the reporter; `receive` passes on its answers."""
        if isinstance(order, ProfileStart):
            command = WorkerCommand(start_profile=order)
        else:
            command = WorkerCommand(stop_profile=order)
        self._answer_profile = answer
        self._ranks[self._reporter].send(command.SerializeToString())

    def place_experts(self, layer: int, placement: Sequence[int]) -> None:
        """Orders a move of a layer's experts between the steps before and after the call."""
        order = ExpertPlacement(layer=layer, physical_to_logical=placement)
        self._command(WorkerCommand(place_experts=order))

    def read_expert_load(self) -> None:
        """Asks the reporter for the load of its stage's experts; `receive` returns it."""
        command = WorkerCommand(read_expert_load=ExpertLoadOrder())
        self._ranks[self._reporter].send(command.SerializeToString())

    async def receive(
        self,
    ) -> StepResult | GraphReport | Recompilation | CompileReport | ExpertLoad | DiskReport:
        """Returns the next result, in the order of the steps sent, or other news.

        Raises:
            WorkerDiedError: a worker is gone, or the ranks cannot go on together.
        """
        while True:
            event = await self._events.next_event()
            kind = event.WhichOneof("event")
            if kind == "profile_started":
                self._answer_profile(event.profile_started)
            elif kind == "profile_ended":
                self._answer_profile(event.profile_ended)
            elif kind == "capture_due":
                self._take_due(self._reporter, event.capture_due)
            elif kind == "adapter_read":
                self.adapters.take(self._reporter, event.adapter_read)
            elif kind == "order_answer":
                self.orders.take(self._reporter, event.order_answer)
            elif kind in _NEWS:
                news: GraphReport | Recompilation | CompileReport | ExpertLoad | DiskReport
                news = getattr(event, kind)
                return news
            elif kind == "result":
                await self._failures.settle(event.result)
                return event.result
            else:
                raise WorkerDiedError(
                    f"{self._ranks[self._reporter].name} sent {kind}, not a result"
                )

    async def show_stacks(self) -> None:
        """Has workers that do not answer write on standard error what their threads do."""
        if all(each.pid is None for each in self._ranks):
            return
        for each in self._ranks:
            each.show_stacks()
        # Were they ended at once, the signal that ends them would overtake.
        await asyncio.sleep(STACKS_GRACE_S)

    async def stop(self) -> None:
        """Ends all ranks, by force if they do not end by themselves. May be called again."""
        self._events.close()
        try:
            await asyncio.gather(*(each.stop() for each in self._ranks))
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
        self._due.clear()
        self._failures.clear()
        self.adapters.fail()
        self.orders.fail()

    def _command(self, command: WorkerCommand) -> None:
        """Sends a command to every rank, at the same place in the order of all."""
        content = command.SerializeToString()
        for each in self._ranks:
            each.send(content)

    def _take_aside(self, number: int, event: WorkerEvent) -> None:
        """Takes an event that `receive` does not get: of another rank than the reporter, mostly."""
        kind = event.WhichOneof("event")
        if kind == "capture_due":
            self._take_due(number, event.capture_due)
        elif kind == "result":
            self._failures.note(number, event.result)
        elif kind == "adapter_read":
            self.adapters.take(number, event.adapter_read)
        elif kind == "order_answer":
            self.orders.take(number, event.order_answer)

    def _take_due(self, number: int, order: GraphOrder) -> None:
        """Orders a capture once every rank would begin one; the reporter says which.

        The compiled model is installed once all ranks have it.
        """
        self._due[number] = order
        if len(self._due) == len(self._ranks):
            common = GraphOrder()
            common.CopyFrom(self._due[self._reporter])
            common.is_compiled = all(each.is_compiled for each in self._due.values())
            self._command(WorkerCommand(capture=common))
            self._due.clear()


def _rank_at(place: RankPlace, num_ranks: int) -> Rank:
    """Returns a rank that is not started yet."""
    if place.node:
        return RemoteRank(place.rank, place.node)
    return RankProcess("the worker" if num_ranks == 1 else f"rank {place.rank}")
