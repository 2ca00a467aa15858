"""Settings of benchmarks."""

import sys

import pytest

from tests.bench.offline import make_bench
from tests.bench.peer import peer_figures
from tests.bench.report import Report
from tests.bench.settings import make_parser, read_settings
from tests.support.restored_logging import restored_logging


@pytest.fixture
def settings_of(monkeypatch, tmp_path):
    def read(*flags):
        monkeypatch.setattr(sys, "argv", ["bench", "--shape", "qwen3-8b", *flags])
        return read_settings(make_parser("A benchmark."), tmp_path)

    with restored_logging():
        yield read


@pytest.mark.parametrize(
    ("flags", "is_comparable"), [((), True), (("--tensor-parallel-size", "2"), False)]
)
def test_figures_of_several_ranks_are_not_compared_with_those_of_one(
    settings_of, flags, is_comparable
):
    settings = settings_of(*flags)
    report = Report("offline", path=None, commit_name="none")
    report.content["machine"]["gpu"] = "NVIDIA H200"
    bench = make_bench(settings, None, report, 1)
    assert (bench.floor is not None) == is_comparable
    assert bool(peer_figures(settings.shape, "NVIDIA H200")) == is_comparable
