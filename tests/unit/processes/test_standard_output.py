"""Commands whose standard output fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.processes.standard_output import CLOSED_PIPE
from tests.support.fake_frontend import fake_frontend_in_thread

COMMANDS = [
    ["--version"],
    ["generate", "one two three"],
    ["generate", "one two three", "--json"],
    ["chat", "hello"],
    ["models"],
    ["tokenize", "one two"],
    ["graphs", "plan", "--help"],
    ["bench", "serving", "--num-requests", "2", "--prompt-tokens", "4", "--output-tokens", "3"],
]


@pytest.fixture(scope="module")
def environment():
    with fake_frontend_in_thread() as frontend:
        yield {**os.environ, "OCTAVO_FRONTEND": frontend.address}


def run_octavo(command, stdout, environment):
    """Runs a command with a standard output; returns its status and error output."""
    line = [sys.executable, "-m", "services.client.cli", *command]
    ended = subprocess.run(
        line, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, check=False
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_line_and_status_1(command, environment):
    with Path("/dev/full").open("w") as full:
        problem = "octavo: cannot write the output: No space left on device\n"
        assert run_octavo(command, full, environment) == (1, problem)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_went_away_ends_a_command_quietly_as_sigpipe_does(command, environment):
    read, write = os.pipe()
    os.close(read)
    try:
        assert run_octavo(command, write, environment) == (CLOSED_PIPE, "")
    finally:
        os.close(write)


def test_any_other_error_of_the_system_keeps_its_traceback():
    program = """
from services.processes.standard_output import checked_output
with checked_output("octavo"):
    open("/nowhere/at/all")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False
    )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr


def test_a_closed_standard_output_is_no_error():
    ended = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m services.client.cli --version >&-"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
