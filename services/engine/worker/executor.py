"""The service's end of the workers: starts all ranks, orders steps, takes results. No torch here.

Every rank gets the same commands in the same order, and does in this order whatever communicates
with the others. One rank sends the results, the reporter: the first of the last pipeline stage. The
others speak up only if something is wrong. Data-parallel ranks have steps of their own: all their
processes get their part of a step, and the first one of each sends its result.
"""

import asyncio
from collections.abc import Callable, Sequence

from protos.engine.v1.worker_pb2 import (
    CompileReport,
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
from services.engine.batch import BatchDescriptor, StepFailure, StepResult
from services.engine.config.engine_config import EngineConfig
from services.engine.config.parallel import LOOPBACK_INTERFACE
from services.engine.worker.environment import worker_environment
from services.engine.worker.joined_results import JoinedResults
from services.engine.worker.meeting import Meeting
from services.engine.worker.placement import RankPlace, rank_places, reporting_ranks
from services.engine.worker.rank_process import LostPeerError, RankProcess, WorkerDiedError
from services.engine.worker.remote_ranks import JoinedNodes, RemoteRank

STACKS_GRACE_S = 0.5
"""Time a worker has to show its stacks before it is ended."""
CAUSE_GRACE_S = 2.0
"""Time in which the end of a rank shows after another one has lost it."""
AGREEMENT_GRACE_S = 10.0
"""Time in which all ranks fail at the same place of a step, if they do; at most half of the time
after which a step counts as hung."""

_NEWS = ("graph", "recompilation", "compiled", "expert_load")
"""Events that `receive` returns beside results."""


ProfileAnswer = Callable[[ProfileStarted | ProfileReport], None]
"""Takes a worker's word that a profile has begun or ended."""
Rank = RankProcess | RemoteRank


class WorkerExecutor:
    """The worker processes of one engine, one of each rank at a time.

    `start`, then `send` and `receive`, then `stop`; after that it may be started again.
    """

    def __init__(self, config: EngineConfig, nodes: JoinedNodes | None = None) -> None:
        """Prepares a start.

        Args:
            config: the engine's.
            nodes: the other hosts; None where there is one host.
        """
        self._config = config
        self._nodes = nodes
        places = rank_places(config.parallel)
        self._ranks = [_rank_at(place, len(places)) for place in places]
        self._reporters = reporting_ranks(config.parallel)
        self._reporter = self._reporters[0]
        self._others = [number for number in range(len(places)) if number != self._reporter]
        self._watches: list[asyncio.Task[WorkerDiedError]] = []
        self._joined: JoinedResults | None = None
        self._joining: asyncio.Task[None] | None = None
        self._due: dict[int, GraphOrder] = {}
        self._failures: dict[int, StepResult] = {}
        self._has_failed = asyncio.Event()
        self._answer_profile: ProfileAnswer = lambda answer: None
        self._agreement_s = min(AGREEMENT_GRACE_S, config.worker.step_timeout_s / 2)
        if config.parallel.pipeline_parallel_size > 1:
            self._agreement_s = 0.0  # another stage waits for this one, and fails nowhere

    @property
    def pid(self) -> int | None:
        """The process id of rank 0 while it lives."""
        return self._ranks[0].pid

    async def start(self, on_progress: Callable[[str], None] | None = None) -> WorkerReady:
        """Starts all ranks and waits until they take steps.

        Args:
            on_progress: called with each stage of the start.

        Raises:
            WorkerDiedError: one could not start, or not in time; the message says why. No process
                is left behind.
        """
        readies: dict[int, WorkerReady] = {}
        limit_s = self._config.worker.worker_start_timeout_s
        on_progress = on_progress or _ignore_progress
        await self._connect(on_progress)
        try:
            async with asyncio.timeout(limit_s):
                await self._spawn()
                await self._wait_until_ready(readies, on_progress)
        except TimeoutError:
            await self.show_stacks()
            await self.stop()
            late = [each for number, each in enumerate(self._ranks) if number not in readies]
            reasons = "; ".join(_describe_late(each) for each in late)
            raise WorkerDiedError(f"{reasons} was not ready within {limit_s} s") from None
        except BaseException:
            await self.stop()
            raise
        if len(self._reporters) > 1:
            self._joined = JoinedResults(self._reporters)
            self._joining = asyncio.create_task(self._join_results(self._joined))
        self._watches = [asyncio.create_task(self._watch(number)) for number in self._others]
        ready = readies[self._reporter]
        infos = [info for _, each in sorted(readies.items()) for info in each.ranks]
        del ready.ranks[:]
        ready.ranks.extend(infos)
        return ready

    def send(self, descriptor: BatchDescriptor, *others: BatchDescriptor) -> None:
        """Orders a step. Never blocks; a worker that is gone shows in `receive`.

        Args:
            descriptor: the order, of the first data-parallel rank if there are several. Each has
                equally many processes, which all get its order.
            others: those of the others, in order.
        """
        if not others:
            self._command(WorkerCommand(step=descriptor.SerializeToString()))
            return
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
    ) -> StepResult | GraphReport | Recompilation | CompileReport | ExpertLoad:
        """Returns the next result, in the order of the steps sent, or other news.

        Raises:
            WorkerDiedError: a worker is gone, or the ranks cannot go on together.
        """
        while True:
            event = await self._next_event()
            kind = event.WhichOneof("event")
            if kind == "profile_started":
                self._answer_profile(event.profile_started)
            elif kind == "profile_ended":
                self._answer_profile(event.profile_ended)
            elif kind == "capture_due":
                self._take_due(self._reporter, event.capture_due)
            elif kind in _NEWS:
                news: GraphReport | Recompilation | CompileReport | ExpertLoad
                news = getattr(event, kind)
                return news
            elif kind == "result":
                self._require_joint(event.result)
                if _is_out_of_memory(event.result):
                    await self._agree_on_failure(event.result)
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
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.cancel()
        self._joined = None
        await asyncio.gather(*(each.stop() for each in self._ranks))
        self._due.clear()
        self._failures.clear()

    async def _connect(self, on_progress: Callable[[str], None]) -> None:
        """Waits for the other hosts, if there are any."""
        if self._nodes is None:
            return
        limit_s = self._config.worker.worker_start_timeout_s
        links = await self._nodes.wait_for_all(limit_s, on_progress)
        for each in self._ranks:
            if isinstance(each, RemoteRank):
                each.connect(links[each.node - 1])

    async def _spawn(self) -> None:
        """Starts the processes and connects to them."""
        config = self._config.model_dump_json()
        meeting = self._open_meeting()
        try:
            for number, each in enumerate(self._ranks):
                if isinstance(each, RemoteRank):
                    each.start(config=config, meeting_address=meeting.address)
                    continue
                arguments = ["--rank", str(number), "--config", config, *meeting.arguments]
                environment = worker_environment(self._config, self._interface)
                fds = [] if meeting.fd is None else [meeting.fd]
                await each.spawn(arguments, environment=environment, fds=fds)
        finally:
            meeting.close()

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

    async def _wait_until_ready(
        self, readies: dict[int, WorkerReady], on_progress: Callable[[str], None]
    ) -> None:
        """Follows the start of all ranks and collects their announcements."""

        async def follow(number: int) -> None:
            readies[number] = await self._follow_start(number, on_progress)

        if len(self._ranks) == 1:
            await follow(0)
            return
        following = [asyncio.create_task(follow(number)) for number in range(len(self._ranks))]
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
            raise _cause_among(errors)

    async def _follow_start(self, number: int, on_progress: Callable[[str], None]) -> WorkerReady:
        rank = self._ranks[number]
        prefix = f"{rank.name}: " if len(self._ranks) > 1 else ""
        while True:
            event = await rank.next_event()
            kind = event.WhichOneof("event")
            if kind == "ready":
                return event.ready
            if kind != "progress":
                raise WorkerDiedError(f"{rank.name} sent {kind} before it was ready")
            rank.stage = event.progress.stage
            on_progress(prefix + rank.stage)

    def _command(self, command: WorkerCommand) -> None:
        """Sends a command to every rank, at the same place in the order of all."""
        content = command.SerializeToString()
        for each in self._ranks:
            each.send(content)

    async def _next_event(self) -> WorkerEvent:
        """Returns what the reporter says next; if a rank is lost, raises what it was lost by."""
        try:
            if self._joined is not None:
                return await self._joined.next_event()
            return await self._ranks[self._reporter].next_event()
        except LostPeerError as error:
            if not self._watches:
                raise
            done, _ = await asyncio.wait(
                self._watches, timeout=CAUSE_GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
            raise _cause_among([*(task.result() for task in done), error]) from error

    async def _join_results(self, joined: JoinedResults) -> None:
        """Listens to the reporter where its results need those of other data-parallel ranks."""
        try:
            while True:
                event = await self._ranks[self._reporter].next_event()
                if event.WhichOneof("event") == "result":
                    self._hear(self._reporter, event)
                else:
                    joined.pass_on(event)
        except WorkerDiedError as error:
            joined.pass_on(error)

    async def _watch(self, number: int) -> WorkerDiedError:
        """Listens to a rank that sends no results; its end ends `receive`."""
        rank = self._ranks[number]
        try:
            while True:
                self._hear(number, await rank.next_event())
        except LostPeerError as error:
            await asyncio.sleep(CAUSE_GRACE_S)
            self._ranks[self._reporter].interrupt(error)
            return error
        except WorkerDiedError as error:
            self._ranks[self._reporter].interrupt(error)
            return error

    def _hear(self, number: int, event: WorkerEvent) -> None:
        """Takes an event of a rank other than the reporter, which says what it leaves out.

        Results of data-parallel ranks count too, the reporter's among them.
        """
        kind = event.WhichOneof("event")
        if kind == "result" and self._joined is not None and number in self._reporters:
            self._joined.put(number, event.result)
        if kind == "capture_due":
            self._take_due(number, event.capture_due)
        elif kind == "result" and _is_out_of_memory(event.result):
            self._failures[number] = event.result
            self._has_failed.set()
            loop = asyncio.get_running_loop()
            loop.call_later(self._agreement_s, self._end_if_alone, number, event.result)

    def _take_due(self, number: int, order: GraphOrder) -> None:
        """Orders a capture once every rank would begin one; the reporter says which."""
        self._due[number] = order
        if len(self._due) == len(self._ranks):
            self._command(WorkerCommand(capture=self._due[self._reporter]))
            self._due.clear()

    def _require_joint(self, result: StepResult) -> None:
        """Raises WorkerDiedError if data-parallel ranks did not all fail, or all succeed."""
        for number, each in zip(self._reporters, (result, *result.across_dp), strict=False):
            if each.failure != result.failure:
                rank, failed = (number, each) if each.failure else (self._reporter, result)
                raise _alone(self._ranks[rank], failed)

    async def _agree_on_failure(self, result: StepResult) -> None:
        """Waits until all ranks have failed at the same place of a step.

        Raises:
            WorkerDiedError: one did not, and waits for the others in the middle of the step.
        """
        self._failures[self._reporter] = result
        try:
            async with asyncio.timeout(self._agreement_s):
                while len(self._failures) < len(self._ranks):
                    self._has_failed.clear()
                    await self._has_failed.wait()
        except TimeoutError:
            raise _alone(self._ranks[self._reporter], result) from None
        failures, self._failures = self._failures, {}
        for number, other in failures.items():
            if (other.step_id, other.num_collectives) != (result.step_id, result.num_collectives):
                raise _alone(self._ranks[number], other)

    def _end_if_alone(self, number: int, result: StepResult) -> None:
        """Ends `receive` if the others have not failed in a rank's step."""
        if self._failures.get(number) is result:
            self._ranks[self._reporter].interrupt(_alone(self._ranks[number], result))


def _is_out_of_memory(result: StepResult) -> bool:
    return result.failure == StepFailure.STEP_FAILURE_OUT_OF_MEMORY


def _rank_at(place: RankPlace, num_ranks: int) -> Rank:
    """Returns a rank that is not started yet."""
    if place.node:
        return RemoteRank(place.rank, place.node)
    return RankProcess("the worker" if num_ranks == 1 else f"rank {place.rank}")


def _alone(rank: Rank, result: StepResult) -> WorkerDiedError:
    return WorkerDiedError(
        f"{rank.name} ran out of memory in step {result.step_id} where other ranks did not; they "
        "cannot go on together"
    )


def _cause_among(errors: Sequence[WorkerDiedError]) -> WorkerDiedError:
    """Returns the error that explains the others: not that a rank has lost another one."""
    return min(errors, key=lambda error: isinstance(error, LostPeerError))


def _errors_of(tasks: set[asyncio.Task[None]]) -> list[WorkerDiedError]:
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, WorkerDiedError):
            raise error
    return [error for error in errors if isinstance(error, WorkerDiedError)]


def _describe_late(rank: Rank) -> str:
    return f"{rank.name} (last seen {rank.stage})" if rank.stage else rank.name


def _ignore_progress(stage: str) -> None:
    """Takes a stage of the start and does nothing."""
