"""Weights that change under load, through both services, the command line and the client."""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file
from typer.testing import CliRunner

from protos.engine.v1 import operator_pb2 as pb
from protos.engine.v1.operator_pb2_grpc import OperatorServiceStub
from services.client.cli import app
from services.client.errors import InvalidRequestError
from services.client.weights import WeightsClient, _messages
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.engine_client import Reply, begin, engine_stub, generate, get_stats
from tests.support.processes import (
    ServiceProcess,
    Stack,
    free_port,
    start_engine,
    start_frontend,
)
from tests.support.waiting import until

FILE = "model.safetensors"
NEAR_TIES = (5, 17, 53, 56, 61)
"""Prompts after which two tokens are within 0.001 of each other somewhere, in one of the versions:
which of them comes depends on what else is in a step."""
PROMPTS = [
    [(7 * n + k) % 200 + 3 for k in range(4 + n % 5)] for n in range(69) if n not in NEAR_TIES
]
NUM_TOKENS = 40
FLAGS = {"dtype": "float32", "max_num_seqs": 64, "worker_patience_s": 120}


def tensors_of(seed: int) -> dict[str, np.ndarray]:
    """Returns the tiny model's tensors and some noise."""
    noise = np.random.default_rng(seed)
    plain = {n: t.float().numpy() for n, t in load_file(TINY_CHECKPOINT / FILE).items()}
    return {
        name: (t + 0.3 * t.std() * noise.standard_normal(t.shape)).astype(np.float32)
        for name, t in plain.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for version in ("0", "1", "2"):
        shutil.copytree(TINY_CHECKPOINT, root / version)
        if version != "0":
            save_file(tensors_of(int(version)), root / version / FILE)
    return root


async def tokens_of(address: str) -> list[list[int]]:
    async with engine_stub(address) as stub:
        replies = await asyncio.gather(
            *(generate(stub, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS)
        )
    return [reply.token_ids for reply in replies]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of an engine that was started on each checkpoint."""
    tokens = {}
    for version in ("0", "1", "2"):
        with start_engine(model=folder / version, **FLAGS) as engine:
            tokens[version] = asyncio.run(tokens_of(engine.address))
    assert tokens["0"] != tokens["1"] != tokens["2"]
    return tokens


@pytest.fixture
def served(folder: Path) -> Any:
    port = free_port()
    engine = start_engine(weights_folder=folder, metrics_port=free_port(), **FLAGS)
    frontend = start_frontend(engine.address, http_port=port)
    with Stack(engine, frontend) as services:
        yield services.engine, f"http://127.0.0.1:{port}"


class Stream:
    """One request whose tokens are collected as they come."""

    def __init__(self, stub: Any, prompt: Sequence[int]) -> None:
        self.reply = Reply()
        call = begin(stub, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
        self.task = asyncio.create_task(self._read(call))

    async def _read(self, call: Any) -> None:
        async for response in call:
            self.reply.token_ids += response.token_ids
            self.reply.usage = response.usage


async def streams_under(engine: ServiceProcess, running: str, version: str, path: str) -> Any:
    """Updates the weights in the middle of 64 streams; returns these and 64 later requests."""
    async with engine_stub(engine.address) as stub:
        streams = [Stream(stub, prompt) for prompt in PROMPTS]
        await until(lambda: all(each.reply.token_ids for each in streams))
        with WeightsClient(engine.address) as client:
            update = partial(client.update, path, version=version, running=running)
            updating = asyncio.create_task(asyncio.to_thread(update))
            later = [Stream(stub, prompt) for prompt in PROMPTS]
            await updating
        after = [Stream(stub, prompt) for prompt in PROMPTS]
        await asyncio.gather(*(each.task for each in (*streams, *later, *after)))
    return [each.reply for each in streams], [each.reply for each in after]


@pytest.mark.parametrize("running", ["finish", "recompute", "keep"])
async def test_an_update_in_the_middle_of_64_streams(
    served: Any, expected: dict[str, list[list[int]]], running: str
) -> None:
    engine, url = served
    streams, after = await streams_under(engine, running, "v1", "1")
    assert [reply.token_ids for reply in after] == expected["1"]
    assert {reply.usage.weights_version for reply in after} == {"v1"}
    assert not any(reply.usage.HasField("first_weights_version") for reply in after)
    assert all(len(reply.token_ids) == NUM_TOKENS for reply in streams)
    tokens = [reply.token_ids for reply in streams]
    if running == "finish":
        assert tokens == expected["0"]
        assert {reply.usage.weights_version for reply in streams} == {""}
    else:
        moved = [reply for reply in streams if reply.usage.HasField("first_weights_version")]
        assert moved
        assert {(r.usage.first_weights_version, r.usage.weights_version) for r in moved} == {
            ("", "v1")
        }
        assert [each[0] for each in tokens] == [each[0] for each in expected["0"]]
        assert tokens != expected["0"]
    body = {"prompt": "The quick", "max_tokens": 4, "model": "tiny"}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = (await http.post(f"{url}/v1/completions", json=body)).json()
    assert answer["usage"]["weights_version"] == "v1"
    async with engine_stub(engine.address) as stub:
        assert (await get_stats(stub)).weights_version == "v1"


def test_the_command_line_and_metrics(served: Any, folder: Path) -> None:
    engine, _ = served
    run, address = CliRunner().invoke, ["--engine", engine.address]
    assert "the weights of the start, after 0" in run(app, ["weights", "show", *address]).output
    command = ["weights", "update", "--from", "1", "--version", "one", *address]
    assert "version one serves" in run(app, command).output
    assert "version one, after 1" in run(app, ["weights", "show", *address]).output
    assert "weights" in run(app, ["stats", "--once", *address]).output
    refused = run(app, [*command[:4], "--version", "two", "--sha256", "00" * 32, *address])
    assert refused.exit_code
    assert "the SHA-256 of the files" in str(refused.exception)
    shared = Path("/dev/shm") / f"octavo-test-{os.getpid()}"
    shutil.copy(folder / "2" / FILE, shared)
    shared.chmod(0o600)
    try:
        command = ["weights", "update", "--shared-memory", shared.name, "--version", "2"]
        assert "version 2 serves" in run(app, [*command, *address]).output
    finally:
        shared.unlink()


async def test_weights_come_over_the_wire_and_outlive_a_worker(
    served: Any, expected: dict[str, list[list[int]]]
) -> None:
    engine, _ = served
    tensors = tensors_of(1)
    client = WeightsClient(engine.address)
    with client:
        info = client.upload(tensors, version="one")
        assert (info.version, info.num_updates) == ("one", 1)
        assert await tokens_of(engine.address) == expected["1"]
        async with engine_stub(engine.address) as stub:
            (worker,) = [each.pid for each in (await get_stats(stub)).ranks]
        os.kill(worker, signal.SIGKILL)
        assert await tokens_after_a_restart(engine.address) == expected["1"]
        names = sorted(tensors)
        other = tensors_of(2)
        half = {name: other[name] for name in names[: len(names) // 2]}
        with pytest.raises(InvalidRequestError, match="tensors are missing"):
            client.upload(half, version="half")
        client.upload(half, version="half", is_part=True)
        rest = {name: other[name] for name in names[len(names) // 2 :]}
        client.upload(rest, version="two", is_part=True, running="recompute")
        assert await tokens_of(engine.address) == expected["2"]


async def tokens_after_a_restart(address: str) -> list[list[int]]:
    """Returns the tokens once a worker that was killed has a successor."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await tokens_of(address)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.2)


def spoiled(
    tensors: dict[str, np.ndarray], fault: str, is_over: threading.Event | None = None
) -> Iterator[Any]:
    """Yields the messages of an upload with a fault, with a wait for `is_over` in the middle."""
    update = pb.WeightsUpdate(version="bad")
    data = False
    for message in _messages(update, tensors):
        if fault == "digest" and message.HasField("tensors"):
            message.tensors.tensors[0].sha256 = bytes(32)
        if fault == "twice" and message.HasField("tensors"):
            message.tensors.tensors.append(message.tensors.tensors[0])
        if fault == "order" and message.HasField("tensors"):
            yield pb.UploadWeightsRequest(data=b"123")
        if message.WhichOneof("part") == "data":
            if fault == "truncated" and data:
                return
            if is_over is not None:
                is_over.wait()
            data = True
        yield message
    if fault == "longer":
        yield pb.UploadWeightsRequest(data=b"1")


FAULTS = {
    "digest": "the SHA-256 of tensor",
    "twice": "comes twice",
    "order": "has 1 to",
    "truncated": "the stream ends after",
    "longer": "more bytes came",
}


async def test_bad_uploads_change_nothing_and_cost_others_nothing(
    served: Any, folder: Path, expected: dict[str, list[list[int]]]
) -> None:
    engine, _ = served
    tensors = tensors_of(1)
    async with engine_stub(engine.address) as generating:
        streams = [Stream(generating, prompt) for prompt in PROMPTS]
        with grpc.insecure_channel(engine.address) as channel:
            await asyncio.to_thread(upload_badly, OperatorServiceStub(channel), tensors)  # type: ignore[no-untyped-call]  # generated
        await asyncio.gather(*(each.task for each in streams))
    assert [each.reply.token_ids for each in streams] == expected["0"]
    await until(lambda: not copies_in(folder))  # that of a caller who left goes after the call
    assert await tokens_of(engine.address) == expected["0"]


def upload_badly(stub: Any, tensors: dict[str, np.ndarray]) -> None:
    """Tries every kind of bad upload; each must be refused with its reason."""
    nan, name = dict(tensors), min(tensors)
    nan[name] = np.full_like(nan[name], np.nan)
    wrong = {**tensors, name: np.zeros((3, 3), np.float32)}
    cases = [(tensors, *each) for each in FAULTS.items()]
    for bad, fault, message in (*cases, (nan, "", "holds NaN"), (wrong, "", "its shape is")):
        with pytest.raises(grpc.RpcError) as caught:
            stub.UploadWeights(spoiled(bad, fault))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fault
        assert message in caught.value.details(), fault
    is_over = threading.Event()
    call = stub.UploadWeights.future(spoiled(tensors, "", is_over))
    try:
        until_updating(stub, is_updating=True)
        with pytest.raises(grpc.RpcError, match="another update"):
            stub.UploadWeights(spoiled(tensors, ""))
        call.cancel()
        until_updating(stub, is_updating=False)
    finally:
        is_over.set()


def until_updating(stub: Any, *, is_updating: bool) -> None:
    """Waits until an update runs, or none does."""
    while stub.GetWeights(pb.GetWeightsRequest()).weights.is_updating != is_updating:
        time.sleep(0.01)


def copies_in(folder: Path) -> list[Path]:
    """Returns the copies of weights that engines keep."""
    return list(folder.glob(".octavo-weights-*/copy-*"))


def test_an_engine_without_the_folder_has_no_such_calls() -> None:
    with start_engine(lora_folder="/tmp", max_loras=1) as engine:
        answer = CliRunner().invoke(
            app, ["weights", "update", "--from", "1", "--version", "1", "--engine", engine.address]
        )
        assert "lacks --weights-folder" in str(answer.exception)
