"""The real services as processes on free loopback ports.

`start_engine(max_num_seqs=4)` passes `--max-num-seqs 4`. Every object here is a context manager,
plain and async alike; leaving it stops what it started, and an error inside shows the tail of
the services' logs.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.forked_program import ForkedProgram
from tests.support.forks import OF_SERVICES, fork_server

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL_LINES = 40
FIRST_PORT, PORTS_EACH, NUM_SHARES = 20_000, 1_500, 8
"""Ports come in shares, one for each pytest process that runs at the same time."""
LONG_TIMEOUTS = {
    "OCTAVO_FRONTEND_ENGINE_SILENCE_TIMEOUT_S": "60",
    "OCTAVO_FRONTEND_TEMPLATE_TIMEOUT_S": "60",
    "OCTAVO_ENGINE_GRAMMAR_TIMEOUT_S": "30",
}
"""For machines that hold a process up for seconds; a test's flags go before."""
OWN_SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    # Operators get a warning of a late compilation; here it ends the engine.
    "OCTAVO_ENGINE_FAIL_ON_LATE_BUILD": "1",
    # Of a larger cache a start takes longer; this one holds 40,000 tokens of the tiny model.
    "OCTAVO_ENGINE_KV_CACHE_MEMORY_MB": "64",
}
_FORKED = (
    "services.engine",
    "services.frontend",
    "tests.support.long_export_timeout",
    "tests.support.steered_engine",
)
Flag = str | int | float | bool | Path
_given_ports: set[int] = set()


class ServiceFailedError(Exception):
    """A service did not start; the message holds the end of its log."""


def free_port() -> int:
    """Returns a loopback port that is free now and that was not returned before.

    It lies below the range from which Linux takes the ports of outgoing connections, so that no
    connection of this or another process takes it before the service does, and in a share of its
    own where tests are spread over processes: gw0, gw1 and so on are pytest-xdist's.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_SHARES
    first = FIRST_PORT + share * PORTS_EACH
    while True:
        port = random.randrange(first, first + PORTS_EACH)
        if port in _given_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given_ports.add(port)
            return port


class ServiceProcess:
    """One `python -m <module>` that listens on a port of loopback, or of the flag `host`.

    It may be stopped and started again, on the same port. `log` is everything it wrote.
    """

    forks = False
    """Whether services are forked from a process that has their modules, instead of started."""

    def __init__(
        self,
        module: str,
        flags: dict[str, Flag],
        *,
        ready_timeout_s: float = 60,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.module = module
        self._is_forked = self.forks and module in _FORKED
        self.credentials = credentials
        """Credentials of its health check; None asks in plain text."""
        self.stderr = subprocess.STDOUT
        """Where its standard error goes; the log, unless a test sets another descriptor."""
        self.host = str(flags.pop("host", "127.0.0.1"))
        """Address that it listens on."""
        self.port = int(flags.pop("port", 0)) or free_port()
        self.ready_timeout_s = ready_timeout_s
        self._flags = flags
        self._log_file = tempfile.NamedTemporaryFile(  # noqa: SIM115  lives as long as self
            mode="w+b", prefix=f"{module}-", suffix=".log"
        )
        self._process: subprocess.Popen[bytes] | ForkedProgram | None = None

    @property
    def address(self) -> str:
        """Where it listens, as host:port."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running service."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that it wrote to standard output and error, over all its runs."""
        return Path(self._log_file.name).read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not exited."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process; returns before it is ready."""
        command = [self.module, "--host", self.host, "--port", str(self.port)]
        command += flag_arguments(self._flags)
        environment = os.environ | LONG_TIMEOUTS | OWN_SETTINGS
        if self._is_forked:
            log = self._log_file.fileno()
            stderr = log if self.stderr == subprocess.STDOUT else self.stderr
            self._process = ForkedProgram(
                fork_server(*OF_SERVICES),
                command,
                environment=environment,
                stdout=log,
                stderr=stderr,
            )
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=self.stderr,
            start_new_session=True,
        )

    def wait_ready(self, service: str = "") -> None:
        """Waits until its health says SERVING for `service`.

        Raises:
            ServiceFailedError: it exited, or was not ready in time.
        """
        deadline = time.monotonic() + self.ready_timeout_s
        while time.monotonic() < deadline:
            if not self.is_running:
                raise ServiceFailedError(f"{self.module} exited {self.returncode}\n{self._tail()}")
            if self.is_serving(service):
                return
            time.sleep(0.05)
        raise ServiceFailedError(
            f"{self.module} was not ready in {self.ready_timeout_s} s\n{self._tail()}"
        )

    def is_serving(self, service: str = "") -> bool:
        """Asks its health once; False when it does not answer."""
        with self._channel() as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=30
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _channel(self) -> grpc.Channel:
        if self.credentials is None:
            return grpc.insecure_channel(self.address)
        return grpc.secure_channel(self.address, self.credentials)

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the service process alone."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 30) -> int:
        """Waits until it exits and returns the status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self, timeout_s: float = 30) -> int | None:
        """Asks it to end, waits, and checks that no process of it is left.

        Returns:
            The exit status; None when it was never started.
        """
        if self._process is None:
            return None
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it and its children at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"--- {self.module}\n{self._tail()}")
        self._close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, error_type, error, traceback)

    def _close(self) -> None:
        self.stop()
        self._log_file.close()

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])


class Stack:
    """An engine and a frontend in front of it."""

    def __init__(self, engine: ServiceProcess, frontend: ServiceProcess) -> None:
        self.engine = engine
        self.frontend = frontend

    def __enter__(self) -> Self:
        # Started together, because the frontend waits for its engine anyway.
        try:
            self.engine.start()
            self.frontend.start()
            self.engine.wait_ready()
            self.frontend.wait_ready()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.frontend.__exit__(error_type, error, traceback)
        self.engine.__exit__(error_type, error, traceback)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, error_type, error, traceback)


def start_engine(
    *,
    module: str = "services.engine",
    credentials: grpc.ChannelCredentials | None = None,
    **flags: Flag,
) -> ServiceProcess:
    """An engine; enter it to start it and wait until it is ready."""
    return ServiceProcess(module, flags, ready_timeout_s=120, credentials=credentials)


def start_frontend(
    engine_address: str, *, credentials: grpc.ChannelCredentials | None = None, **flags: Flag
) -> ServiceProcess:
    """A frontend of the engine at `engine_address`; enter it to start it and wait."""
    return ServiceProcess(
        "services.frontend", {"engine_address": engine_address, **flags}, credentials=credentials
    )


def stack(
    *, engine: dict[str, Flag] | None = None, frontend: dict[str, Flag] | None = None
) -> Stack:
    """Both services, with flags for each; enter it to start them and wait."""
    engine_process = start_engine(**(engine or {}))
    return Stack(engine_process, start_frontend(engine_process.address, **(frontend or {})))


def flag_arguments(flags: dict[str, Flag]) -> list[str]:
    """Turns {"max_num_seqs": 4, "verbose": False} into command line arguments."""
    arguments = []
    for name, value in flags.items():
        kebab = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{kebab}" if value else f"--no-{kebab}")
        else:
            arguments += [f"--{kebab}", str(value)]
    return arguments
