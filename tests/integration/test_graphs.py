"""Graphs in the running engine, emulated on a CPU: same tokens, and figures that report them."""

import asyncio
import json
import sys

import grpc
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from services.client.cli import main
from tests.support.forked_program import run_octavo
from tests.support.pace import together
from tests.support.processes import start_engine

OCTAVO = [sys.executable, "-m", "services.client.cli"]
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64, "device": "cpu"}
NUM_OUTPUT = 24


async def generate(stub):
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    request = engine_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7, 8], sampling=sampling)
    return [token async for response in stub.Generate(request) for token in response.token_ids]


async def all_graphs(stub):
    async with asyncio.timeout(240):
        while True:
            stats = await stub.GetStats(engine_pb2.GetStatsRequest())
            if len(stats.graphs) == stats.num_graphs_planned == 3:
                return
            await asyncio.sleep(0.01)


async def test_an_engine_serves_at_once_and_then_by_graphs():
    with start_engine(**SMALL) as engine:
        async with grpc.aio.insecure_channel(engine.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            expected = await generate(stub)
            stats = await stub.GetStats(engine_pb2.GetStatsRequest())
            assert (stats.cudagraph_mode, len(stats.graphs)) == ("NONE", 0)
    flags = {"cudagraph_mode": "full_decode_only", "capture_while_serving": True}
    with start_engine(**SMALL, **flags) as engine:
        async with grpc.aio.insecure_channel(engine.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            assert await generate(stub) == expected
            await all_graphs(stub)
            assert await generate(stub) == expected
            stats = await stub.GetStats(engine_pb2.GetStatsRequest())
    assert stats.cudagraph_mode == "FULL_DECODE_ONLY"
    assert [graph.graph_bs for graph in stats.graphs] == [4, 2, 1]
    assert all(graph.captured and graph.capture_s > 0 for graph in stats.graphs)
    assert stats.graphs[-1].num_replays >= NUM_OUTPUT - 1
    assert stats.graph_dispatch["graph"] >= NUM_OUTPUT - 1


def test_the_command_shows_an_engines_graphs(monkeypatch, capsys):
    flags = {"cudagraph_mode": "full_decode_only", "capture_while_serving": False}
    with start_engine(**SMALL, **flags) as engine:
        monkeypatch.setenv("OCTAVO_ENGINE", engine.address)
        with pytest.raises(SystemExit):
            main(["graphs"])
        assert "3/3 graphs" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["graphs", "--json"])
        figures = json.loads(capsys.readouterr().out)
    assert figures["num_captured"] == figures["num_planned"] == 3


PASSES = {"linear_gate": 3, "linear_residual": 6, "norm_linear": 6, "qk_norm_rope_cache": 3}
"""Matches in the embedded model's three layers."""


async def all_matches(stub):
    """Waits until the model is traced; returns the matches of passes that found anything."""
    async with asyncio.timeout(240):
        while True:
            stats = await stub.GetStats(engine_pb2.GetStatsRequest())
            if stats.pass_matches:
                return {name: count for name, count in stats.pass_matches.items() if count}
            await asyncio.sleep(0.01)


async def tokens(address):
    async with grpc.aio.insecure_channel(address) as channel:
        return await generate(engine_pb2_grpc.EngineServiceStub(channel))


async def tokens_around_matches(address):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        stats = await stub.GetStats(engine_pb2.GetStatsRequest())
        before = await generate(stub)
        assert await all_matches(stub) == PASSES
        return bool(stats.pass_matches), before, await generate(stub)


def test_a_first_start_changes_over_and_a_later_one_runs_its_trace(tmp_path):
    with start_engine(**SMALL) as engine:
        expected = asyncio.run(tokens(engine.address))
    flags = {"compilation_level": 3, "compile_cache_dir": tmp_path, "log_format": "json"}
    for is_later in (False, True):
        with start_engine(**SMALL, **flags) as engine:
            is_traced, before, after = asyncio.run(tokens_around_matches(engine.address))
            assert before == after == expected
            shown = octavo("graphs", "--engine", engine.address)
            lines = [json.loads(line) for line in engine.log.splitlines() if line.startswith("{")]
        # The first one serves before it is traced, however fast that is.
        assert is_traced or not is_later
        assert f"linear_gate {PASSES['linear_gate']}" in shown
        (traced,) = [line for line in lines if line["event"] == "model_traced"]
        events = [line["event"] for line in lines]
        assert (events.index("model_traced") < events.index("worker_ready")) == is_later
        assert traced["is_kept"] or not is_later


def octavo(*arguments):
    done = run_octavo(*arguments)
    done.check_returncode()
    return done.stdout


async def load(engine):
    """More than a thousand steps of decodes: many of three requests, some of two and one."""

    async def generate(stub, num_output):
        sampling = sampling_pb2.SamplingParams(
            temperature=0, max_tokens=num_output, ignore_eos=True
        )
        request = engine_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7], sampling=sampling)
        async for _ in stub.Generate(request):
            pass

    async with grpc.aio.insecure_channel(engine.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for _ in range(9):
            async with together(engine, 3):
                calls = asyncio.gather(*(generate(stub, 120 - shorter) for shorter in (0, 4, 8)))
            await calls


def test_an_engine_plans_its_captures_from_what_an_earlier_one_saw(tmp_path):
    flags = {**SMALL, "cudagraph_mode": "full_decode_only", "histogram_dir": tmp_path}
    flags |= {"cuda_graph_sizes": 4, "log_format": "json", "capture_while_serving": False}
    with start_engine(**flags) as engine:
        asyncio.run(load(engine))
        health = octavo("health", engine.address, "--timeout-s", "60")
        assert health == "serving, graphs 3/3 captured\n"
        plan = json.loads(octavo("graphs", "plan", "--engine", engine.address, "--json"))
        text = octavo("graphs", "plan", "--engine", engine.address)
        engine.stop()
    decodes = plan["decodes"]
    assert decodes["today"]["sizes"] == [1, 2, 4]
    assert decodes["planned"]["sizes"][1:] == [3, 4]
    assert decodes["planned"]["padding"] < decodes["today"]["padding"]
    flag = ",".join(str(size) for size in decodes["planned"]["sizes"])
    assert f"--cudagraph-capture-sizes {flag} --cudagraph-piece-sizes " in text
    (kept,) = tmp_path.rglob("*.json")
    kept_plan = json.loads(octavo("graphs", "plan", "--histogram", str(kept), "--json"))
    assert kept_plan["decodes"] == decodes

    with start_engine(**flags, capture_sizes="auto") as engine:
        figures = json.loads(octavo("graphs", "--engine", engine.address, "--json"))
        lines = [json.loads(line) for line in engine.log.splitlines() if line.startswith("{")]
    captured = [graph["num_tokens"] for graph in figures["graphs"]]
    assert captured == decodes["planned"]["sizes"][::-1]
    assert figures["coverage"]["decodes"]["sizes"] == decodes["planned"]["sizes"]
    events = {line["event"]: line for line in lines}
    assert events["capture_sizes_planned"]["sizes"] == decodes["planned"]["sizes"]
    report = events["graph_coverage_reported"]
    assert (report["decodes_up_to"], report["num_steps_seen"] > 1000) == (4, True)
    assert events["graphs_complete"]["num_captured"] == 3
