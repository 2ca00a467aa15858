"""Which GPUs each engine of `octavo serve` sees."""

import os
import subprocess
import sys

import pytest

from services.client import gpus
from services.client.gpus import EngineNeeds, divide_gpus, engine_needs, visible_gpus
from services.client.supervisor import ServiceFailedError

FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


def shown(environments):
    return [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments]


def test_each_engine_gets_the_next_gpu():
    assert shown(divide_gpus(3, EngineNeeds(), FOUR)) == ["GPU-a", "GPU-b", "GPU-c"]


def test_an_engine_of_several_gpus_gets_neighbours():
    needs = EngineNeeds(num_gpus=2)
    assert shown(divide_gpus(2, needs, FOUR)) == ["GPU-a,GPU-b", "GPU-c,GPU-d"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_single_engine_sees_what_we_see(device):
    assert divide_gpus(1, EngineNeeds(device=device), FOUR) == [{}]


@pytest.mark.parametrize(("device", "found"), [("cpu", FOUR), ("auto", [])])
def test_on_a_cpu_nothing_is_divided(device, found):
    assert divide_gpus(9, EngineNeeds(device=device, num_gpus=2), found) == [{}] * 9


@pytest.mark.parametrize(
    ("num_engines", "needs", "found", "line"),
    [
        (5, EngineNeeds(), FOUR, "5 engines need 5 GPUs, 1 each, and 4 are visible"),
        (2, EngineNeeds(), FOUR[:1], "2 engines need 2 GPUs, 1 each, and 1 is visible"),
        (3, EngineNeeds(num_gpus=2), FOUR, "3 engines need 6 GPUs, 2 each, and 4 are visible"),
        (1, EngineNeeds(num_gpus=8), FOUR, "1 engine needs 8 GPUs, and 4 are visible"),
        (1, EngineNeeds(device="cuda"), [], "1 engine needs 1 GPU, and 0 are visible"),
        (2, EngineNeeds(names_devices=True), FOUR, "--devices gives all 2 engines the same GPUs"),
    ],
)
def test_engines_without_gpus_of_their_own_are_refused_in_one_line(num_engines, needs, found, line):
    with pytest.raises(ServiceFailedError, match=line) as refused:
        divide_gpus(num_engines, needs, found)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0,1", ["0", "1"]), (" 3 , 1", ["3", "1"]), ("2,-1,3", ["2"]), ("-1", []), ("", [])],
)
def test_the_variable_decides_which_gpus_there_are(value, expected):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_a_gpu_that_is_named_twice_is_refused():
    with pytest.raises(ServiceFailedError, match="1,1 names a GPU twice"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "1,1"})


def test_without_the_variable_the_driver_lists_them(monkeypatch):
    listing = (sys.executable, "-c", "print('GPU-a\\nGPU-b')")
    monkeypatch.setattr(gpus, "_LIST_COMMAND", listing)
    assert visible_gpus({}) == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize("command", [("no-such-program",), (sys.executable, "-c", "exit(9)")])
def test_without_a_driver_there_are_none(monkeypatch, command):
    monkeypatch.setattr(gpus, "_LIST_COMMAND", command)
    assert visible_gpus({}) == []


def test_flags_win_over_the_environment():
    environ = {"OCTAVO_ENGINE_DEVICE": "cpu", "OCTAVO_ENGINE_TENSOR_PARALLEL_SIZE": "4"}
    assert engine_needs([], environ) == EngineNeeds(device="cpu", num_gpus=4)
    flags = ["--max-num-seqs", "8", "--device=cuda", "--tensor-parallel-size", "2"]
    assert engine_needs(flags, environ) == EngineNeeds(device="cuda", num_gpus=2)
    assert engine_needs(["--devices", "0,1"], {}).names_devices


def test_an_engine_on_several_hosts_needs_its_share_of_gpus_here():
    flags = ["--tensor-parallel-size=8", "--pipeline-parallel-size=2"]
    assert engine_needs([*flags, "--num-nodes=2"], {}).num_gpus == 8
    assert engine_needs(flags, {"OCTAVO_ENGINE_NUM_NODES": "4"}).num_gpus == 4


@pytest.mark.parametrize(
    "flags", [["--tensor-parallel-size", "two"], ["--tensor-parallel-size=0"], ["--device=tpu"]]
)
def test_malformed_flags_are_refused_before_anything_starts(flags):
    with pytest.raises(ServiceFailedError, match="the engine's flags"):
        engine_needs(flags, {})


def test_the_command_says_so_before_anything_starts():
    command = [sys.executable, "-m", "services.client.cli", "serve", "--engines", "3"]
    command += ["--port", "0", "--engine-port", "0"]
    refused = subprocess.run(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert "3 engines need 3 GPUs, 1 each, and 2 are visible" in refused.stderr
    assert "starting" not in refused.stderr
