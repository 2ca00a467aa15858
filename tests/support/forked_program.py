"""Programs that are forked from a process that has their modules, instead of started.

They are processes of their own with the command line, the environment and the descriptors that a
start would give them.
"""

import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forks import fork


class ForkedProgram:
    """The part of subprocess.Popen that tests use; the leader of a process group."""

    def __init__(
        self,
        server: socket.socket,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """Forks what `python -m` or, after "-c", `python -c` runs; standard input is empty."""
        with Path(os.devnull).open("rb") as nothing:
            descriptors = {0: nothing.fileno(), 1: stdout, 2: stderr}
            self._report = fork(
                server, command, environment=environment, descriptors=descriptors, group=0
            )
        self._lines = self._report.makefile("rb")
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""
        return self._returncode_within(0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Returns how it ended, when it has.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        returncode = self._returncode_within(timeout_s)
        if returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0)
        return returncode

    def _returncode_within(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout_s)[0]:
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._report.close()
        return self.returncode
