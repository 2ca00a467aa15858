"""Keeps the services running as child processes."""

import asyncio
import contextlib
import os
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from services.client.channel import PLAIN, Tls
from services.client.health import LIVENESS, READINESS, wait_until_serving
from services.processes.child import child_command, python_command
from services.processes.stop_signals import stop_signals

MAX_RESTARTS = 5
"""Deaths of a service in a row that are answered with a restart."""
STEADY_S = 60.0
"""Running time after which a service's count of failures starts again at 0."""
PROGRESS_INTERVAL_S = 5.0
STOP_TIMEOUT_S = 40.0
"""Time to drain after SIGTERM, somewhat more than the services' own limit; then SIGKILL."""
DEATH_NOTICE_S = 5.0
"""Time for the death of a service to be known after a call to it has failed."""
LOG_TAIL_LINES = 20

Result = TypeVar("Result")


class ServiceFailedError(Exception):
    """A service did not start, or died too often.

    exit_code: the service's, or 128 and the number of the signal that ended it; 1 without either.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service to run."""

    name: str
    module: str
    """The module that Python runs, with `arguments`."""
    arguments: Sequence[str]
    address: str
    """Where its health is asked, as host:port."""
    tls: Tls = PLAIN
    """Facts needed to ask."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it gets besides ours."""
    log: Path | None = None
    """File for its standard error; None shares ours."""
    starts_asleep: bool = False
    """Whether it takes no requests before it is woken; it counts as started once it answers."""


@dataclass(slots=True, kw_only=True)
class _Child:
    service: Service
    process: Process
    started: float = field(default_factory=time.monotonic)
    num_deaths: int = 0


class Supervisor:
    """Starts services one after the other, restarts failed ones, and stops them in reverse.

    Args:
        report: takes one line of progress for people.
        first_backoff_s: wait before the first restart; it doubles with each one.
        is_outlived: whether services go on when this process ends without `stop`. Otherwise they
            are killed then (on Linux).
    """

    def __init__(
        self,
        report: Callable[[str], None],
        *,
        first_backoff_s: float = 0.5,
        is_outlived: bool = False,
    ) -> None:
        self._report = report
        self._first_backoff_s = first_backoff_s
        self._command = python_command if is_outlived else child_command
        self._children: list[_Child] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the services, in the order they were started."""
        return [child.process.pid for child in self._children]

    async def start(self, service: Service) -> None:
        """Starts a service and waits until it takes requests.

        Raises:
            ServiceFailedError: it died first; trying again would only repeat the mistake.
        """
        self._report(f"{service.name}: starting on {service.address}")
        try:
            child = _Child(service=service, process=await self._spawn(service))
        except OSError as error:
            raise ServiceFailedError(_describe_refusal(service, error)) from error
        self._children.append(child)
        if not await self._becomes_ready(child):
            raise ServiceFailedError(_describe_death(child), exit_code=_exit_code(child))

    async def wait_for(
        self, service: Service, work: Coroutine[Any, Any, Result], doing: str
    ) -> Result:
        """Waits for work of a service that was started, and says every few seconds that it does.

        Raises:
            ServiceFailedError: the service died first.
        """
        [child] = [each for each in self._children if each.service is service]
        task = asyncio.create_task(work)
        try:
            if not await self._outlives(child, task, doing):
                raise ServiceFailedError(_describe_death(child), exit_code=_exit_code(child))
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def watch(self) -> None:
        """Restarts services that die, until it is cancelled.

        Raises:
            ServiceFailedError: one died too often.
        """
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def stop(self) -> None:
        """Asks the services to finish, the last one started first, and waits for it."""
        for child in reversed(self._children):
            if child.process.returncode is None:
                child.process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await child.process.wait()
            except TimeoutError:
                self._report(
                    f"{child.service.name}: did not stop in {STOP_TIMEOUT_S:.0f} s, killed"
                )
                child.process.kill()
                await child.process.wait()
        self._children.clear()

    def kill(self) -> None:
        """Ends the services at once."""
        for child in self._children:
            if child.process.returncode is None:
                child.process.kill()

    async def _keep(self, child: _Child) -> None:
        while True:
            await child.process.wait()
            if time.monotonic() - child.started > STEADY_S:
                child.num_deaths = 0
            await self._restart(child)
            await self._becomes_ready(child)

    async def _restart(self, child: _Child) -> None:
        """Starts a service that has died; a start that the system refuses counts as a death."""
        description = _describe_death(child)
        while True:
            child.num_deaths += 1
            # Models that share its card go on without it.
            if child.num_deaths > MAX_RESTARTS and not child.service.starts_asleep:
                raise ServiceFailedError(
                    f"{description}; {MAX_RESTARTS} restarts failed", exit_code=_exit_code(child)
                )
            backoff_s = self._first_backoff_s * 2 ** min(child.num_deaths - 1, MAX_RESTARTS)
            self._report(f"{description}; starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            try:
                child.process = await self._spawn(child.service)
            except OSError as error:
                description = _describe_refusal(child.service, error)
                continue
            child.started = time.monotonic()
            return

    async def _becomes_ready(self, child: _Child) -> bool:
        """Waits until the child takes requests, or has died."""
        service, started = child.service, time.monotonic()
        ready = asyncio.create_task(
            wait_until_serving(
                service.address,
                service.tls,
                service=LIVENESS if service.starts_asleep else READINESS,
            )
        )
        try:
            if not await self._outlives(child, ready, "starting"):
                return False
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        what = "asleep" if service.starts_asleep else "ready"
        self._report(f"{service.name}: {what} after {time.monotonic() - started:.1f} s")
        return True

    async def _outlives(self, child: _Child, work: asyncio.Task[Any], doing: str) -> bool:
        """Waits until work is done or the child has died; returns whether it lives."""
        death = asyncio.create_task(child.process.wait())
        started = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait(
                    {death, work}, timeout=PROGRESS_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    elapsed_s = time.monotonic() - started
                    self._report(f"{child.service.name}: still {doing}, {elapsed_s:.0f} s")
                    continue
                with contextlib.suppress(TimeoutError):  # work may fail as the child dies
                    async with asyncio.timeout(DEATH_NOTICE_S if _has_failed(work) else 0):
                        await asyncio.shield(death)
                return not death.done()
        finally:
            death.cancel()
            await asyncio.gather(death, return_exceptions=True)

    async def _spawn(self, service: Service) -> Process:
        command = self._command(service.module, service.arguments)
        environment = os.environ | service.environment
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop them in order.
        if service.log is None:
            return await asyncio.create_subprocess_exec(
                *command, env=environment, stdin=DEVNULL, start_new_session=True
            )
        with service.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


async def run_until_signalled(
    work: Coroutine[Any, Any, None], on_second_signal: Callable[[], None]
) -> None:
    """Runs `work`; SIGINT, SIGTERM or SIGHUP cancels it, a second one calls `on_second_signal`."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    num_signals = 0

    def on_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            task.cancel()
        else:
            on_second_signal()

    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not num_signals:
            raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _has_failed(work: asyncio.Task[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


def _describe_refusal(service: Service, error: OSError) -> str:
    return f"{service.name} cannot be started: {error.strerror}"


def _exit_code(child: _Child) -> int:
    """Returns a dead service's exit code as a shell would; never 0, as it should still run."""
    status = child.process.returncode or 1
    return status if status > 0 else 128 - status


def _describe_death(child: _Child) -> str:
    service, status = child.service, child.process.returncode
    how = f"was ended by signal {-status}" if status and status < 0 else f"exited with {status}"
    if service.log is None:
        return f"{service.name} {how}"
    tail = service.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"{service.name} {how}; the end of {service.log}:", *tail])
