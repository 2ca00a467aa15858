"""Child processes: started, restarted, stopped."""

import asyncio
import os
import signal

import psutil
import pytest

from services.client import supervisor as supervisor_module
from services.client.supervisor import (
    MAX_RESTARTS,
    Service,
    ServiceFailedError,
    Supervisor,
    run_until_signalled,
)
from tests.support.processes import free_port

LONG_TIMEOUT_S = 240
"""Several processes start in this time, one after the other, on a machine that does much else."""


class Reports:
    """Remembers progress lines and lets a test wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Condition()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._notifier = asyncio.ensure_future(self._notify())

    async def wait_for(self, text: str, count: int = 1) -> None:
        async with asyncio.timeout(LONG_TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: sum(text in line for line in self.lines) >= count)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def service(mode: str, **fields) -> Service:
    port = str(free_port())
    return Service(
        name="thing",
        module="tests.support.health_service",
        arguments=[port, str(mode)],
        address=f"127.0.0.1:{port}",
        **fields,
    )


@pytest.fixture
async def reports():
    return Reports()


@pytest.fixture
async def supervisor(reports):
    made = Supervisor(reports, first_backoff_s=0.01)
    yield made
    made.kill()
    await made.stop()


async def test_a_service_gets_its_variables_besides_ours(supervisor, monkeypatch):
    monkeypatch.setenv("OURS", "kept")
    await supervisor.start(service("serve", environment={"CUDA_VISIBLE_DEVICES": "3"}))
    environment = psutil.Process(supervisor.pids[0]).environ()
    assert (environment["OURS"], environment["CUDA_VISIBLE_DEVICES"]) == ("kept", "3")


async def test_start_returns_when_the_service_is_ready(supervisor, reports):
    await supervisor.start(service("serve"))
    assert reports.lines[-1].startswith("thing: ready after")


async def test_a_service_that_dies_at_once_is_not_tried_again(supervisor, tmp_path):
    log = tmp_path / "thing.log"
    with pytest.raises(ServiceFailedError, match="the model folder is missing"):
        await supervisor.start(service("fail", log=log))


async def test_stop_ends_every_process_and_waits_for_it(supervisor):
    await supervisor.start(service("serve"))
    await supervisor.start(service("serve"))
    pids = supervisor.pids
    await supervisor.stop()
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


async def test_a_service_that_ignores_sigterm_is_killed(supervisor, reports, monkeypatch):
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_S", 0.2)
    await supervisor.start(service("stubborn"))
    (pid,) = supervisor.pids
    await supervisor.stop()
    assert not psutil.pid_exists(pid)
    assert "killed" in reports.lines[-1]


async def test_a_service_that_dies_is_started_again(supervisor, reports):
    await supervisor.start(service("serve"))
    watching = asyncio.create_task(supervisor.watch())
    os.kill(supervisor.pids[0], signal.SIGKILL)
    await reports.wait_for("ready after", count=2)
    assert any("was ended by signal 9" in line for line in reports.lines)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_service_that_dies_too_often_is_given_up(supervisor, reports, tmp_path):
    await supervisor.start(service(tmp_path / "ran_once"))
    os.kill(supervisor.pids[0], signal.SIGKILL)
    with pytest.raises(ServiceFailedError, match=f"{MAX_RESTARTS} restarts failed"):
        await asyncio.wait_for(supervisor.watch(), LONG_TIMEOUT_S)
    assert sum("starting it again" in line for line in reports.lines) == MAX_RESTARTS


async def test_an_engine_that_shares_its_card_is_not_given_up(supervisor, reports, tmp_path):
    await supervisor.start(service("serve"))
    await supervisor.start(service(tmp_path / "ran_once", starts_asleep=True))
    watching = asyncio.create_task(supervisor.watch())
    other, asleep = supervisor.pids
    os.kill(asleep, signal.SIGKILL)
    await reports.wait_for("starting it again", count=MAX_RESTARTS + 2)
    assert not watching.done()
    assert supervisor.pids[0] == other
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_start_that_the_system_refuses_is_tried_again(supervisor, reports, monkeypatch):
    await supervisor.start(service("serve"))
    watching = asyncio.create_task(supervisor.watch())
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        os.kill(supervisor.pids[0], signal.SIGKILL)
        await reports.wait_for("cannot be started: No such file or directory")
    await reports.wait_for("ready after", count=2)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_a_first_start_that_the_system_refuses_is_one_clear_error(supervisor, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ServiceFailedError, match=r"^thing cannot be started: No such file"):
        await supervisor.start(service("serve"))


async def test_the_first_signal_cancels_and_the_second_one_hurries():
    hurried = asyncio.Event()
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await hurried.wait()
            cleaned_up = True

    await asyncio.wait_for(run_until_signalled(work(), hurried.set), 60)
    assert cleaned_up
