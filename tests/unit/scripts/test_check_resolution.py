"""scripts/check_resolution with a resolver that only pretends to ask an index."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAKE_UV = """#!/bin/sh
read -r requirement
echo "$* $requirement" >>"$CALLS"
env | grep '^UV_' >>"$VARIABLES"
case "$* $requirement" in *"$REFUSED"*) echo "no version fits" >&2; exit 1 ;; esac
"""
FAKE_PYTHON = """#!/bin/sh
case "$*" in
"-m pip wheel"*) while [ "$1" != --wheel-dir ]; do shift; done; touch "$2/octavo-1-any.whl" ;;
*) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Runs the script; the fake resolver refuses what contains `refused`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in (("uv", FAKE_UV), ("python", FAKE_PYTHON.format(python=sys.executable))):
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)

    def run(refused: str = "no requirement") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts" / "check_resolution"],
            env=os.environ
            | {
                "OCTAVO_VENV": str(tmp_path),
                "OCTAVO_NO_SETUP": "1",
                "CALLS": str(tmp_path / "calls"),
                "VARIABLES": str(tmp_path / "variables"),
                "REFUSED": refused,
                "UV_FIND_LINKS": "/wheels",
                "UV_INDEX": "http://127.0.0.1:1/simple",
            },
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    run.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    run.variables = lambda: (tmp_path / "variables").read_text()
    return run


def test_each_python_resolves_a_clone_for_cpus_and_gpus_and_all_extras_of_the_wheel(check):
    assert check().returncode == 0
    for python in ("3.11", "3.12", "3.13", "3.14"):
        asked = [call for call in check.calls() if f"--python-version {python} " in call]
        of_cpu, of_gpu = (
            f"--constraint constraints.txt --constraint constraints-{device}.txt - "
            for device in ("cpu", "gpu")
        )
        for ending in (
            f"{of_cpu}.[engine,frontend,cpu]",
            f"{of_cpu}.[dev,cpu]",
            f"{of_gpu}.[engine,frontend,gpu]",
            "octavo-1-any.whl",
        ):
            assert any(call.endswith(ending) for call in asked), (python, ending)


def test_local_configuration_does_not_hide_what_users_meet(check):
    check()
    assert all("--no-config" in call for call in check.calls())
    assert "/wheels" not in check.variables()
    assert "127.0.0.1:1" not in check.variables()


def test_what_does_not_resolve_fails_and_is_named(check):
    failed = check("constraints-cpu.txt - .[dev,cpu]")
    assert failed.returncode == 1
    assert "no version fits" in failed.stdout
    assert "Python 3.14: .[dev,cpu] does not resolve" in failed.stdout


def test_without_an_index_it_says_so_and_passes(check):
    done = check("hatchling")
    assert done.returncode == 0
    assert "no index is reachable" in done.stdout
    assert len(check.calls()) == 1
