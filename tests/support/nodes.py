"""Nodes of an engine as processes: `octavo worker-node` on loopback or in a network namespace."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from services.engine.config.parallel import ParallelConfig
from services.engine.edge.status import status_of
from services.engine.rpc.nodes import NodeServicer
from services.engine.worker.remote_ranks import JoinedNodes
from services.transport.counts import LocalCounts
from services.transport.grpc_options import ServerLimits
from services.transport.health import Health
from services.transport.refused_calls import RefusedCalls
from services.transport.server import listen, make_server
from services.transport.tls import ServerTls
from tests.support.forked_program import ForkedProgram
from tests.support.forks import OF_SERVICES, fork_server
from tests.support.held import children
from tests.support.processes import LOG_TAIL_LINES, ROOT, Flag, flag_arguments

_LIMITS = ServerLimits(
    max_request_bytes=2**24,
    max_connections=16,
    max_streams_per_connection=16,
    max_sessions=64,
    slow_reader_timeout_s=60,
)


@contextlib.asynccontextmanager
async def head_server(
    nodes: JoinedNodes | None, config: ParallelConfig, tls: ServerTls | None = None
) -> AsyncIterator[str]:
    """Serves nodes on loopback and yields the address; None serves an engine of one host."""
    server = make_server(
        "test",
        health=Health("test", counts=LocalCounts()),
        status_of=status_of,
        max_message_bytes=2**24,
        limits=_LIMITS,
        counts=LocalCounts(),
    )
    if nodes is not None:
        NodeServicer(nodes, config, RefusedCalls(LocalCounts())).add_to(server)
    port = listen(server, "127.0.0.1", 0, tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class NodeProcess:
    """One node; enter it to start it. It may be killed and started again."""

    def __init__(self, head: str, *, prefix: Sequence[str] = (), **flags: Flag) -> None:
        """Prepares a node.

        Args:
            head: the engine's address.
            prefix: a command that runs the node's, such as `ip netns exec NAME`. Without one the
                node is forked from a process that has its modules.
            flags: other flags of the node.
        """
        arguments = flag_arguments({"head": head, **flags})
        self._prefix = prefix
        self._command = ["services.engine", "worker-node", *arguments]
        self._log = tempfile.NamedTemporaryFile(prefix="node-", suffix=".log")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | ForkedProgram | None = None

    @property
    def log(self) -> str:
        """Everything that it wrote."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its other processes."""
        return children(self)

    def start(self) -> None:
        """Starts the process."""
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "OCTAVO_NODE_LOG_FORMAT": "json"}
        if not self._prefix:
            log = self._log.fileno()
            self._process = ForkedProgram(
                fork_server(*OF_SERVICES),
                self._command,
                environment=environment,
                stdout=log,
                stderr=log,
            )
            return
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", *self._command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = 60) -> int:
        """Waits until it exits and returns the status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to the node's process alone."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Ends it in good order, by force if it does not end."""
        if self._process is None or self._process.poll() is not None:
            return
        self.kill(signal.SIGCONT)
        self.kill(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note("\n".join(["--- node", *self.log.splitlines()[-LOG_TAIL_LINES:]]))
        self.stop()
        self._log.close()
