"""Forking needs a process without other threads, so each test is a program of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from textwrap import dedent

import psutil

PRELUDE = """
import os, socket, sys
from pathlib import Path
from services.engine.worker.start.build_processes import BuildProcesses
from tests.support.fake_builds import Deadly, Failing, Noted

folder = Path(sys.argv[1])
paths = [folder / str(number) for number in range(20)]
noted = [Noted(path) for path in paths]

def fork():
    return BuildProcesses.fork(lambda: None)

def built():
    return [path.read_text().split() for path in paths if path.exists()]
"""


def run(tmp_path, program):
    arguments = [sys.executable, "-c", PRELUDE + dedent(program), str(tmp_path)]
    return subprocess.run(arguments, check=True, timeout=60, stdout=subprocess.PIPE, text=True)


def test_orders_are_built_in_other_processes_each_with_its_niceness(tmp_path):
    run(
        tmp_path,
        """
        processes = fork()
        first = processes.begin(noted[:5])
        second = processes.begin(noted[5:], niceness=3)
        report = processes.wait(first)
        assert (report.num_built, report.num_failed, report.error) == (5, 0, ""), report
        assert {niceness for _, niceness in built()[:5]} == {str(os.nice(0))}
        assert processes.wait(second).num_built == 15
        assert processes.wait([*first, *second]).num_built == 20
        assert str(os.getpid()) not in {pid for pid, _ in built()}
        assert {niceness for _, niceness in built()[5:]} == {str(os.nice(0) + 3)}
        processes.stop()
        processes.stop()
        """,
    )


def test_the_worker_does_not_wait_for_builds_that_were_not_asked_for(tmp_path):
    run(
        tmp_path,
        """
        os.mkfifo(folder / "never")
        processes = fork()
        numbers = processes.begin([Noted(folder / "first"), Noted(folder / "never")])
        assert processes.wait(numbers[:1]).num_built == 1
        assert (folder / "first").exists()
        processes.stop()
        """,
    )


def test_what_cannot_be_built_is_counted_and_the_rest_is_built(tmp_path):
    run(
        tmp_path,
        """
        processes = fork()
        report = processes.wait(processes.begin([Failing(), *noted]))
        assert (report.num_built, report.num_failed) == (20, 1), report
        assert "two dtypes in one branch" in report.error
        assert len(built()) == 20
        processes.stop()
        """,
    )


def test_a_builder_that_dies_takes_nothing_with_it(tmp_path):
    run(
        tmp_path,
        """
        processes = fork()
        report = processes.wait(processes.begin([Deadly(), *noted]))
        assert (report.num_built, report.num_failed) == (20, 1), report
        assert "died" in report.error
        processes.stop()
        """,
    )


def test_without_the_processes_nothing_is_built_and_no_launch_waits(tmp_path):
    run(
        tmp_path,
        """
        processes = fork()
        os.kill(processes._pid, 9)
        for _ in range(2):
            report = processes.wait(processes.begin(noted))
            assert (report.num_built, report.num_failed) == (0, 20), report
            assert report.error
        processes.stop()
        assert not built()
        """,
    )


def test_sockets_of_the_worker_are_not_held_open(tmp_path):
    run(
        tmp_path,
        """
        ours, theirs = socket.socketpair()
        processes = fork()
        theirs.close()
        ours.settimeout(30)
        assert ours.recv(1) == b""
        processes.stop()
        """,
    )


def test_all_end_with_the_worker(tmp_path):
    program = PRELUDE + "processes = fork()\nprint(processes._pid, flush=True)\nsys.stdin.read()"
    worker = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        template = psutil.Process(int(worker.stdout.readline()))
        os.kill(worker.pid, signal.SIGKILL)
        psutil.wait_procs([template], timeout=30)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert template.status() == psutil.STATUS_ZOMBIE
