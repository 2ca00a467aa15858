"""The files and tables of benchmarks."""

import json

from tests.bench.offline_engine import GraphUse, StartTimes
from tests.bench.peer import peer_figures
from tests.bench.report import Report, summary


def test_summary_keeps_every_repeat():
    assert summary([3.0, 1.0, 2.0]) == {
        "values": [3.0, 1.0, 2.0],
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
    }


def test_report_is_on_disk_after_every_figure(tmp_path):
    path = tmp_path / "result.json"
    report = Report("offline", path=path, shape="tiny", settings={"a": 1}, commit_name="abc")
    report.add("decode, batch 1", [1.0, 3.0], "ms/step")
    content = json.loads(path.read_text())
    assert content["figures"]["decode, batch 1"]["median"] == 2.0
    assert content["commit"] == "abc"
    assert content["versions"]["python"]
    assert {"gpu", "driver", "cpu", "num_cpus", "num_gpus"} == set(content["machine"])
    report.problem("serving: out of time\nmore")
    assert json.loads(path.read_text())["problems"] == ["serving: out of time\nmore"]
    assert list(tmp_path.iterdir()) == [path]


def test_table_has_every_figure_and_what_is_missing():
    report = Report("offline", path=None)
    report.add("prefill, 2048 tokens", [50.0], "ms")
    report.problem("frontend exited 1\nTraceback\nModuleNotFoundError: No module named 'uvicorn'")
    lines = report.table().splitlines()
    assert lines[1].split()[:4] == ["prefill,", "2048", "tokens", "50"]
    why = "frontend exited 1: ModuleNotFoundError: No module named 'uvicorn'"
    assert lines[2] == f"not measured: {why}"


def test_peer_figures_are_for_the_machine_that_they_were_taken_on():
    known = peer_figures("qwen3-0.6b", "NVIDIA H200")
    assert known["decode, batch 1"].peer == (1.86 + 2.19) / 2
    assert known["decode, batch 1"].floor == 0.27
    assert known["serving, output"].floor is None
    assert peer_figures("qwen3-0.6b", "another GPU") == {}
    assert peer_figures("tiny", "NVIDIA H200") == {}


def test_start_times_split_the_way_to_ready():
    times = StartTimes(
        started_s=10.0,
        stages=[
            ("loading weights", 13.0),
            ("loading weights 1/2", 14.0),
            ("building kernels", 15.0),
            ("compiling the model", 16.0),
            ("allocating the KV cache", 19.0),
            ("captured graphs 1/1", 21.0),
        ],
        ready_s=22.0,
        capture_s=1.5,
    )
    assert times.parts() == {
        "ready": 12.0,
        "import": 3.0,
        "load": 2.0,
        "kernels": 1.0,
        "compile": 3.0,
        "capture": 1.5,
        "rest": 1.5,
    }


def test_a_start_without_compilation_has_none():
    times = StartTimes(started_s=0.0, stages=[("loading weights", 1.0)], ready_s=3.0)
    assert times.parts()["compile"] == 0
    assert times.parts()["load"] == 2.0


def test_graph_use_counts_what_happened_since():
    def use(graph, eager, tokens, padded):
        return GraphUse(
            dispatch={"graph": graph, "oversize": eager},
            num_steps=graph + eager,
            graph_tokens=tokens,
            padded_tokens=padded,
            num_preemptions=0,
            busy_us=1000 * (graph + eager),
        )

    since = use(40, 10, 400, 100).since(use(10, 10, 100, 70))
    assert since["hit_rate"] == 1.0
    assert since["padding"] == 0.1
    assert since["dispatch"] == {"graph": 30}
    assert since["busy_s"] == 0.03
    assert use(1, 1, 5, 0).since(use(1, 1, 5, 0))["hit_rate"] is None
