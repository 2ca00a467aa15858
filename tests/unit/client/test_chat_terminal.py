"""`octavo chat` on a terminal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_frontend import fake_frontend_in_thread

ROOT = Path(__file__).resolve().parents[3]


class Terminal:
    """A process whose standard streams are a terminal, and what is on the screen."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True
        )
        os.close(theirs)
        self.screen = ""

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` shows up after what was waited for before."""
        while text not in self.screen:
            self.screen += os.read(self._ours, 4096).decode()
        self.screen = self.screen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal():
    with fake_frontend_in_thread() as fake:
        command = [sys.executable, "-m", "services.client.cli", "chat", "--frontend", fake.address]
        opened = Terminal(command)
        yield opened
        opened.close()


@pytest.mark.timeout(60)
def test_ctrl_c_ends_the_answer_and_not_the_program(terminal):
    terminal.wait_for("/quit leaves")
    terminal.wait_for("> ")
    terminal.type("HANG on")
    terminal.wait_for("HANG on")  # the echo of what was typed
    terminal.wait_for("HANG")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(cancelled)")
    terminal.type("still here")
    terminal.wait_for("finish reason stop")
    terminal.type("/quit")
    assert terminal.process.wait(30) == 0
