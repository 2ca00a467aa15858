"""Programs that are forked from a process that has their modules, instead of started.

They are processes of their own with the command line, the environment and the descriptors that a
start would give them.
"""

import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forks import OF_SERVICES, fork, fork_server

LIMIT_S = 850
"""No command takes nearly this long, however slow the machine; one that does hangs."""


class ForkedProgram:
    """The part of subprocess.Popen that tests use; the leader of a process group."""

    def __init__(
        self,
        server: socket.socket,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """Forks what `python -m` or, after "-c", `python -c` runs.

        Standard input is empty without a descriptor for it.
        """
        with Path(os.devnull).open("rb") as nothing:
            source = nothing.fileno() if stdin is None else stdin
            descriptors = {0: source, 1: stdout, 2: stderr}
            self._report = fork(
                server, command, environment=environment, descriptors=descriptors, group=0
            )
        self._lines = self._report.makefile("rb")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""
        return self._returncode_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns how it ended, when it has; timeout is in seconds.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        returncode = self._returncode_within(timeout)
        if returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return returncode

    def terminate(self) -> None:
        """Asks it to end, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _returncode_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout_s)[0]:
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._report.close()
        return self.returncode


def start_service(service: str, *flags: str, environment: Mapping[str, str]) -> ForkedProgram:
    """Forks what `octavo engine` or `octavo frontend` becomes."""
    server, command = fork_server(*OF_SERVICES), [f"services.{service}", *flags]
    return ForkedProgram(server, command, environment=environment)


def start_octavo(
    *arguments: object, environment: Mapping[str, str] = os.environ, output: int = 1
) -> ForkedProgram:
    """Forks a command of `octavo`, and the services that it starts or becomes.

    output: the descriptor of standard output and error.
    """
    return ForkedProgram(
        fork_server(*OF_SERVICES),
        ["services.client", *map(str, arguments)],
        environment=environment,
        stdout=output,
        stderr=output,
    )


def run_octavo(
    *arguments: object,
    modules: Sequence[str] = OF_SERVICES,
    environment: Mapping[str, str] = os.environ,
    given: str = "",
) -> subprocess.CompletedProcess:
    """Runs a command of `octavo` to its end, as `run_forked` does, in the project's folder.

    Services that it starts or becomes are forked too.
    """
    return run_forked(
        "services.client",
        *map(str, arguments),
        modules=modules,
        environment=environment,
        given=given,
    )


def run_forked(
    *command: str,
    modules: Sequence[str] = OF_SERVICES,
    environment: Mapping[str, str] = os.environ,
    given: str = "",
) -> subprocess.CompletedProcess:
    """Runs a command of a ForkedProgram to its end.

    modules: of the fork server. given: standard input.

    Returns:
        How it ended, with the text of both outputs.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(given)
        stdin.seek(0)
        program = ForkedProgram(
            fork_server(*modules),
            command,
            environment=environment,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
        )
        try:
            returncode = program.wait(timeout=LIMIT_S)
        finally:
            program.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(command, returncode, stdout.read(), stderr.read())
