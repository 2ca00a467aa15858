"""Programs that tests fork are as programs that they start: a failure shows, none outlives them."""

import json
import os
import signal

import psutil
import pytest

from tests.support.forked_program import ForkedProgram
from tests.support.forks import fork_server
from tests.support.programs import run_interpreted

SHOW = """
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ), os.getpgrp() == os.getpid(), __name__]))
"""


def forked(program, *arguments, **options):
    command = ["-c", program, *arguments]
    return ForkedProgram(fork_server(), command, environment={"A": "1"}, **options)


def test_it_has_its_arguments_environment_output_and_group(tmp_path):
    with (tmp_path / "output").open("w") as output:
        assert forked(SHOW, "first", stdout=output.fileno()).wait(60) == 0
    shown = json.loads((tmp_path / "output").read_text())
    assert shown == [["-c", "first"], {"A": "1"}, True, "__main__"]


@pytest.mark.parametrize(
    ("program", "returncode"),
    [
        ("raise ValueError", 1),
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_it_ends_as_a_started_one_does(program, returncode):
    assert forked(program).wait(60) == returncode


def test_it_is_killed_when_what_asked_for_it_is_gone():
    program = forked("import signal; signal.pause()")
    process = psutil.Process(program.pid)
    assert program.poll() is None
    program._lines.close()
    program._report.close()
    process.wait(60)


def test_a_signal_reaches_it():
    program = forked("import signal; signal.pause()")
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM


def test_a_failed_program_of_kernels_fails_its_test():
    run_interpreted("")
    with pytest.raises(AssertionError, match="ended with 1"):
        run_interpreted("assert False")
