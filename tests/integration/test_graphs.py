"""Graphs in the running engine, rehearsed on a CPU: same tokens, and figures that tell of them."""

import asyncio
import json

import grpc
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from services.client.cli import main
from tests.support.processes import start_engine

SMALL = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64, "device": "cpu"}
NUM_OUTPUT = 24


async def generate(stub):
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    request = engine_pb2.GenerateRequest(prompt_token_ids=[5, 6, 7, 8], sampling=sampling)
    return [token async for response in stub.Generate(request) for token in response.token_ids]


async def all_graphs(stub):
    async with asyncio.timeout(30):
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
    with start_engine(**SMALL, cudagraph_mode="full_decode_only") as engine:
        monkeypatch.setenv("OCTAVO_ENGINE", engine.address)
        with pytest.raises(SystemExit):
            main(["graphs"])
        assert "3/3 graphs" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["graphs", "--json"])
        figures = json.loads(capsys.readouterr().out)
    assert figures["num_captured"] == figures["num_planned"] == 3
