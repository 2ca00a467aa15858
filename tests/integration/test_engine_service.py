"""The engine as a process with its real worker and the embedded model."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import (
    DrainRequest,
    GenerateRequest,
    GetModelInfoRequest,
)
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.forked_program import run_forked
from tests.support.pace import stopped
from tests.support.processes import ServiceProcess, start_engine
from tests.support.steered_engine import MODULE, stop_after
from tests.support.waiting import until

FLAGS = {"kv_cache_memory_mb": 16, "log_format": "json"}


@asynccontextmanager
async def engine(**flags):
    async with (
        start_engine(**FLAGS, **flags) as process,
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        yield process, EngineServiceStub(channel)


def ask(max_tokens, **fields):
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[5, 6, 7, 8], sampling=sampling, **fields)


async def read_all(call):
    token_ids, last = [], None
    while (response := await call.read()) is not grpc.aio.EOF:
        token_ids += response.token_ids
        last = response
    return token_ids, last


def events(process: ServiceProcess, name: str) -> list[dict]:
    lines = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


async def test_a_request_is_served_and_leaves_one_line_in_the_log():
    async with engine() as (process, stub):
        info = await stub.GetModelInfo(GetModelInfoRequest())
        assert (info.model, info.dtype) == ("tiny", "float32")
        first, last = await read_all(stub.Generate(ask(20, request_id="first")))
        again, _ = await read_all(stub.Generate(ask(20)))
        assert first == again
        assert len(first) == 20
        assert last.usage.output_tokens == 20
        lines = [e for e in events(process, "request_finished") if e["request_id"] == "first"]
        assert [line["output_tokens"] for line in lines] == [20]


async def test_drain_answers_and_the_engine_exits_0(stop_file):
    async with engine(module=MODULE, stop_file=stop_file) as (process, stub):
        stop_after(stop_file, 50)
        call = stub.Generate(ask(300))
        async with stopped(process):
            await call.read()
            draining = asyncio.ensure_future(stub.Drain(DrainRequest()))
            await until(lambda: events(process, "drain_began"), timeout_s=60)
        drained = await draining
        assert (drained.num_finished, drained.num_aborted) == (1, 0)
        assert await asyncio.to_thread(process.wait) == 0


class TestCommandLine:
    def run(self, *arguments):
        return run_forked("services.engine", "--port", "0", *arguments)

    def test_help_explains_every_flag(self):
        result = self.run("--help")
        assert result.returncode == 0
        assert "Tokens in one block of the KV cache." in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--block-size", "0"), "octavo engine: --block-size is '0': Input should be greater"),
            (("--model", "/nowhere"), "octavo engine: /nowhere is not a folder"),
            (("--max-model-len", "99999"), "octavo engine: --max-model-len is 99999; the model's"),
        ],
    )
    def test_a_wrong_value_is_one_clear_line(self, arguments, message):
        result = self.run(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith(message)
        assert result.stderr.count("\n") == 1

    def test_a_checkpoint_that_cannot_be_loaded_ends_the_engine_with_the_reason(self, tmp_path):
        for path in TINY_CHECKPOINT.iterdir():
            if path.suffix != ".safetensors":
                (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "model.safetensors").write_bytes(b"not weights")
        result = self.run("--model", str(tmp_path), "--log-format", "json")
        assert result.returncode == 1
        (line,) = [line for line in result.stderr.splitlines() if "engine_start_failed" in line]
        assert "safetensors" in json.loads(line)["error"]
