"""`graphs plan`: from an engine's statistics, or a file of its steps, to sizes and flags."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from models.cudagraph_mode import CUDAGraphMode
from models.ops.attention.cudagraph_support import AttentionCGSupport
from protos.engine.v1.engine_pb2 import GetStatsResponse, GraphCoverage, GraphStats
from services.engine.batch import GraphKind
from services.engine.capture_sizes.command import make_plans
from services.engine.capture_sizes.history import StepHistory
from services.engine.capture_sizes.planner import plan_sizes
from services.engine.command import run
from services.engine.compilation.graphs.capture_plan import graph_support, supported_mode
from services.engine.config.compilation_level import CompilationLevel

ROOT = Path(__file__).resolve().parents[4]
MIB = 2**20
DECODES = {1: 400, 3: 300, 5: 500}
OTHERS = {33: 90, 40: 10}


def history(**fields):
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "decodes": {}, "others": {}}
    return StepHistory(**{**values, **fields})


def plan(*arguments, stats=b""):
    return subprocess.run(
        [sys.executable, "-m", "services.engine", "graphs", "plan", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        input=stats,
        capture_output=True,
        timeout=120,
        check=False,
    )


def plan_here(*arguments, stats=b""):
    """Does what `plan` does without a process: Python takes half a second to start one."""
    streams = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stats))),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        status = run(["graphs", "plan", *arguments])
    return subprocess.CompletedProcess(
        arguments, status, *(each.getvalue().encode() for each in streams)
    )


DECODE = GraphKind.GRAPH_KIND_DECODE


def engine_stats(**fields):
    return GetStatsResponse(
        cudagraph_mode="FULL_DECODE_ONLY",
        decode_coverage=GraphCoverage(sizes=[2, 8], limit=8),
        other_coverage=GraphCoverage(limit=64),
        graphs=[
            GraphStats(kind=DECODE, num_tokens=8, captured=True, num_bytes=9 * MIB),
            GraphStats(kind=DECODE, num_tokens=4, captured=False, fault="planted"),
            GraphStats(kind=DECODE, num_tokens=2, captured=True, num_bytes=MIB),
        ],
        **fields,
    ).SerializeToString()


def test_as_many_graphs_as_today_reach_as_far_and_pad_less():
    graphs = {8: 0, 2: 0, 1: 0}
    (decodes,) = make_plans(
        history(decodes=DECODES, decode_graphs=graphs, cudagraph_mode="FULL_DECODE_ONLY")
    )
    assert (decodes.today.sizes, decodes.planned.sizes) == ([1, 2, 8], (1, 5, 8))
    assert decodes.today.num_padded == 300 * 5 + 500 * 3
    assert decodes.planned.num_padded == 300 * 2
    assert decodes.arguments == "--cudagraph-capture-sizes 1,5,8"


def test_without_graphs_the_pattern_says_how_many_and_both_kinds_are_planned():
    decodes, pieces = make_plans(history(decodes=DECODES, others=OTHERS))
    assert (decodes.today.sizes, decodes.today.hit_rate) == ([], 0.0)
    assert decodes.planned.sizes == (1, 3, 5, 8)
    assert pieces.planned.sizes == (33, 40, 64)
    assert pieces.arguments == "--cudagraph-piece-sizes 33,40,64"


def test_where_decodes_run_as_pieces_there_is_one_plan_for_all_steps():
    (pieces,) = make_plans(
        history(decodes=DECODES, others=OTHERS, cudagraph_mode="PIECEWISE"), num_graphs=3
    )
    assert pieces.planned.sizes == plan_sizes({**DECODES, **OTHERS}, num_graphs=3, reach=64)


def test_a_budget_counts_the_pool_and_leaves_out_what_was_not_measured():
    graphs = {8: 9 * MIB, 4: MIB, 2: MIB}
    seen = history(decodes=DECODES, others=OTHERS, decode_graphs=graphs)
    (decodes,) = make_plans(seen, memory_mb=10)
    assert (decodes.planned.sizes, decodes.planned.num_bytes) == ((5, 8), 10 * MIB)
    (smaller,) = make_plans(seen, memory_mb=4)
    assert (smaller.planned.sizes, smaller.planned.num_bytes) == ((3,), 4 * MIB)
    assert smaller.planned.hit_rate == 700 / 1200
    (nothing,) = make_plans(seen, memory_mb=1)
    assert nothing.planned.sizes == ()


def test_what_cannot_be_planned_is_an_error():
    with pytest.raises(ValueError, match="no step was seen"):
        make_plans(history())
    with pytest.raises(ValueError, match="measured"):
        make_plans(history(decodes=DECODES, decode_graphs={8: 0}), memory_mb=100)


def test_the_command_reads_an_engines_report_and_names_the_flags():
    answer = plan(stats=engine_stats(decode_steps=DECODES, other_steps=OTHERS))
    text = answer.stdout.decode()
    assert answer.returncode == 0, answer.stderr
    assert "graphs today: FULL_DECODE_ONLY" in text
    assert "steps of decodes: 1,200 seen, of 1 to 5 requests\n" in text
    assert "other steps: 100 seen, of 33 to 40 tokens; auto wants 1,000" in text
    rows = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
    assert ["today", "2", "100.0%", "47.2%", "10.0 MiB", "2 8"] in rows
    # Pool and graphs take as much for other sizes, as the largest stays.
    assert ["planned", "2", "100.0%", "36.7%", "10.0 MiB", "5 8"] in rows
    assert "--cudagraph-capture-sizes 5,8 --cudagraph-piece-sizes 33,40,64\n" in text
    assert text.splitlines()[-1] == (
        "graphs of steps with prompts need --cudagraph-mode full, and any --compilation-level but 1"
    )


@pytest.mark.parametrize(
    ("mode", "advice"),
    [
        ("NONE", "graphs need --cudagraph-mode full, and any --compilation-level but 1"),
        ("FULL", "--cudagraph-capture-sizes 1,3,5,8 --cudagraph-piece-sizes 33,40,64"),
        ("PIECEWISE", "--cudagraph-piece-sizes 1,3,5,33,40,64"),
    ],
)
def test_the_advice_is_what_an_engine_in_that_mode_lacks(tmp_path, mode, advice):
    path = tmp_path / "steps.json"
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "cudagraph_mode": mode}
    path.write_text(json.dumps({**limits, "decodes": DECODES, "others": OTHERS}))
    answer = plan_here("--histogram", str(path), "--num-graphs", "6")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.decode().splitlines()[-1] == advice
    assert "compilation-level 3" not in answer.stdout.decode()


def test_the_flags_that_a_plan_names_give_graphs_of_both_kinds_at_every_level_but_one():
    # The promise of the advice, from the rules by which a worker plans its graphs.
    for level in CompilationLevel:
        support = graph_support(
            AttentionCGSupport.UNIFORM_BATCH,
            level,
            decode_q_len=1,
            on_cpu=False,
        )
        mode = supported_mode(CUDAGraphMode.FULL, support).mode
        assert bool(mode.mixed_mode()) == (level != CompilationLevel.DYNAMO_AS_IS)


def test_the_command_reads_a_file_and_prints_json(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(
        json.dumps(
            {
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "decodes": DECODES,
                "others": {},
            }
        )
    )
    answer = plan_here("--histogram", str(path), "--num-graphs", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)["decodes"]
    assert figures["num_steps"] == 1200
    assert figures["planned"]["sizes"] == [5, 8]
    assert figures["today"] == {"sizes": [], "hit_rate": 0.0, "padding": 0.0, "num_bytes": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no step was seen yet"),
        (["--histogram", "/nowhere.json"], "/nowhere.json"),
        (["--histogram", str(ROOT / "README.md")], "README.md does not hold step sizes"),
    ],
)
def test_the_command_says_what_is_missing(arguments, message):
    answer = plan_here(*arguments, stats=engine_stats())
    assert answer.returncode == 1
    assert answer.stderr.decode().startswith("octavo: ")
    assert message in answer.stderr.decode()
