"""The first command that a new user runs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.processes import ROOT

MARKER = "OCTAVO_TEST_DEMO"


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {"OCTAVO_VENV": sys.prefix, "OCTAVO_NO_SETUP": "1"}
    own |= {MARKER: str(tmp_path), "TMPDIR": str(tmp_path)}
    own |= {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}  # there is none
    return subprocess.run(
        [ROOT / "scripts" / "demo", *arguments],
        cwd=tmp_path, env=os.environ | own, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip


def processes_with(marker: str) -> list[psutil.Process]:
    """Returns what a demo has started and not ended: its environment is inherited."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARKER) == marker:
                found.append(process)
    return found


def test_the_demo_answers_says_what_it_cost_and_leaves_nothing(tmp_path):
    finished = demo(tmp_path, "What is 7 + 5?")
    assert finished.returncode == 0, finished.stderr
    assert "12" in finished.stdout.split("> What is 7 + 5?")[1]
    assert re.search(r"output tokens, .*first token after \d+ ms, \d+ tokens/s", finished.stdout)
    assert "both services stopped" in finished.stderr
    assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_is_kept_goes_on_answering_until_it_is_stopped_as_it_says(tmp_path):
    finished = demo(tmp_path, "--keep")
    assert finished.returncode == 0, finished.stderr
    pids = [int(pid) for pid in re.findall(r"stop: +kill (.*)", finished.stdout)[0].split()]
    try:
        talk = re.findall(r"talk: +octavo (.*)", finished.stdout)[0].split()
        answer = subprocess.run(
            [sys.executable, "-m", "services.client.cli", *talk, "What is 2 + 2?"],
            cwd=ROOT, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        assert answer.returncode == 0
    finally:
        running = processes_with(str(tmp_path))
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
    assert len(running) >= 3  # frontend, engine and its worker
    assert psutil.wait_procs(running, timeout=30)[1] == []


def test_a_service_that_fails_shows_the_end_of_its_log(tmp_path):
    finished = demo(tmp_path, "--model", "/nowhere")
    assert finished.returncode == 2  # the engine's
    assert "engine exited with" in finished.stderr
    assert "/nowhere" in finished.stderr
