"""Two results side by side."""

import json

import pytest

from services.client.bench.compare import ResultFileError, comparison, read_result
from services.client.cli import main


def content(**changes):
    values = {
        "benchmark": "offline",
        "shape": "tiny",
        "commit": "aaa",
        "machine": {"gpu": "NVIDIA H200", "driver": "580"},
        "versions": {"torch": "2.11.0"},
        "settings": {"max_num_seqs": 8},
        "figures": {
            "decode": {"values": [4.0, 4.2, 4.4], "unit": "ms/step", "better": "lower"},
            "output": {"values": [100.0, 102.0], "unit": "tokens/s", "better": "higher"},
        },
    }
    return {**values, **changes}


@pytest.fixture
def compare(tmp_path):
    """Returns the lines of a comparison of two results."""

    def run(first, second):
        paths = [tmp_path / "first.json", tmp_path / "second.json"]
        for path, each in zip(paths, (first, second), strict=True):
            path.write_text(json.dumps(each))
        return list(comparison(*map(read_result, paths)))

    return run


def figures(values, better="lower"):
    return {"decode": {"values": values, "unit": "ms/step", "better": better}}


def test_equal_results_have_ratio_one_and_no_differences(compare):
    lines = compare(content(), content())
    assert len(lines) == 3
    row = "decode 4.2 +-4.8% 4.2 +-4.8% 1.000 ms/step, same within the spread"
    assert " ".join(lines[1].split()) == row


@pytest.mark.parametrize(
    ("values", "better", "verdict"),
    [
        ([2.0, 2.1, 2.2], "lower", "0.500 ms/step, better"),
        ([8.4, 8.0, 9.0], "lower", "2.000 ms/step, worse"),
        ([8.4, 8.0, 9.0], "higher", "2.000 ms/step, better"),
        ([4.3, 4.5, 4.6], "lower", "1.071 ms/step, same within the spread"),
    ],
)
def test_verdict_needs_ranges_that_do_not_meet(compare, values, better, verdict):
    first = content(figures=figures([4.0, 4.2, 4.4], better))
    lines = compare(first, content(figures=figures(values, better)))
    assert " ".join(lines[-1].split()).endswith(verdict)


def test_single_runs_get_a_ratio_and_no_verdict(compare):
    lines = compare(content(figures=figures([4.0])), content(figures=figures([3.0])))
    assert lines[-1].endswith("0.750  ms/step, lower is better, one run each")


def test_other_machines_and_versions_are_printed_before_the_figures(compare):
    other = content(machine={"gpu": "NVIDIA L4", "driver": "580"}, versions={"torch": "2.13.0"})
    assert compare(content(), other)[:3] == [
        "gpu: NVIDIA H200 -> NVIDIA L4",
        "torch: 2.11.0 -> 2.13.0",
        "machine or versions differ: the ratios tell of that, too",
    ]


def test_other_commits_and_settings_are_printed_without_a_warning(compare):
    other = content(commit="bbb", settings={"max_num_seqs": 16, "dtype": "float32"})
    assert compare(content(), other)[:3] == [
        "commit: aaa -> bbb",
        "setting max_num_seqs: 8 -> 16",
        "setting dtype: - -> float32",
    ]


def test_figures_of_one_side_only_are_named(compare):
    lines = compare(content(), content(figures=figures([4.0])))
    assert lines[-1] == "only in the first: output"


@pytest.fixture
def serving():
    """A result of `octavo bench serving --json`."""
    latency = {"p50": 10.0, "p90": None, "p99": None, "mean": 11.0}
    return {
        "target": "frontend 127.0.0.1:50050",
        "load": {"num_requests": 4, "rate": None},
        "num_failed": {},
        "requests_per_s": 2.0,
        "output_tokens_per_s": 64.0,
        "ttft_ms": latency,
        "inter_token_ms": latency,
        "e2e_ms": latency,
    }


def test_results_of_bench_serving_compare_too(compare, serving):
    lines = compare(serving, {**serving, "requests_per_s": 4.0})
    assert [line.split()[0] for line in lines[1:4]] == [
        "requests_per_s",
        "output_tokens_per_s",
        "ttft_ms",
    ]
    assert "2.000  requests/s, higher is better, one run each" in lines[1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {"a": {}}}', '{"figures": 3}'])
def test_other_files_are_refused_with_their_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"other\.json"):
        read_result(path)


def test_command_prints_the_ratios(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content()))
    with pytest.raises(SystemExit) as exited:
        main(["bench", "compare", str(path), str(path)])
    assert exited.value.code == 0
    assert "1.000  ms/step, same within the spread" in capsys.readouterr().out


def test_command_refuses_a_missing_file(tmp_path, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert exited.value.code == 2
    assert "Invalid value" in capsys.readouterr().err


def test_past_the_frontend_and_failures_are_printed(compare, serving):
    other = serving | {"target": "engine 127.0.0.1:50051", "num_failed": {"UNAVAILABLE": 2}}
    assert compare(serving, other)[:2] == ["target: frontend -> engine", "failed requests: 0 -> 2"]


@pytest.fixture
def compare_files(tmp_path, capsys):
    def run(first, second, *flags):
        paths = [tmp_path / "first.json", tmp_path / "second.json"]
        for path, result in zip(paths, (first, second), strict=True):
            path.write_text(json.dumps(result))
        with pytest.raises(SystemExit) as exited:
            main(["bench", "compare", *map(str, paths), *flags])
        return exited.value.code, *capsys.readouterr()

    return run


def test_command_refuses_unlike_loads_and_says_how_they_differ(compare_files, serving):
    other = serving | {"load": {"num_requests": 4, "rate": 5.0}}
    code, output, errors = compare_files(serving, other)
    assert (code, output) == (1, "")
    assert "the loads differ: load rate: None -> 5.0 (--unlike" in errors
    code, output, _ = compare_files(serving, other, "--unlike")
    assert code == 0
    assert "the loads differ: the ratios tell of that, too" in output


def test_command_refuses_unlike_benchmarks(compare_files, serving):
    code, _, errors = compare_files(content(), serving)
    assert code == 1
    assert "-> bench serving" in errors
    code, _, errors = compare_files(content(), content(shape="qwen3-8b"))
    assert code == 1
    assert "shape: " in errors
