"""OpenEngine's protocol of a real engine, and Dynamo's own frontend and sidecar before it."""

import os
import shutil
import signal
import subprocess
from contextlib import ExitStack, contextmanager, suppress

import grpc
import httpx
import pytest
import tokenizers
from safetensors.torch import load_file

from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import (
    GenerateRequest,
    GetModelInfoRequest,
    ListLorasRequest,
    LoadLoraRequest,
    LoraAdapter,
    SubscribeKvEventsRequest,
    UnloadLoraRequest,
)
from protos.openengine.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.adapters import random_factors, write_adapter
from tests.support.processes import free_port, start_engine
from tests.support.waiting import until

FLAGS = {"kv_cache_memory_mb": 16, "openengine_grpc": True, "kv_events": True}
PROMPT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
DYNAMO = os.environ.get("OCTAVO_DYNAMO_PYTHON", "")
"""The interpreter of an environment that has ai-dynamo."""


async def test_a_request_by_its_schema_is_answered_and_its_blocks_are_told():
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY_CHECKPOINT / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT * 2, add_special_tokens=False).ids
    async with (
        start_engine(**FLAGS) as process,
        grpc.aio.insecure_channel(process.address) as channel,
    ):
        inference, control = InferenceStub(channel), ControlStub(channel)
        model = await control.GetModelInfo(GetModelInfoRequest())
        events = control.SubscribeKvEvents(SubscribeKvEventsRequest())
        await events.initial_metadata()
        call = inference.Generate(
            GenerateRequest(
                request_id="r",
                model=model.served_model_name,
                token_ids={"ids": ids},
                sampling={"temperature": 0},
                stopping={"max_tokens": 24},
            )
        )
        told = []
        while (response := await call.read()) is not grpc.aio.EOF:
            told.append(response)
        output = [info.token_id for each in told for info in each.token.tokens]
        assert "12" in tokenizer.decode(output)
        assert told[-1].finished.reason == openengine_pb2.FINISH_REASON_STOP
        assert told[-1].finished.stop_match.HasField("eos_token_id")
        assert told[-1].usage.prompt_tokens == len(ids)
        batch = (await events.read()).batch
        assert list(batch.events[0].block_stored.token_ids) == ids[: len(ids) // 16 * 16]
        events.cancel()


async def test_adapters_are_loaded_named_listed_and_unloaded(tmp_path):
    modules = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in load_file(TINY_CHECKPOINT / "model.safetensors").items()
        if name.endswith("proj.weight")
    }
    for number in (1, 2):
        factors = random_factors(modules, seed=number, size=0.05)
        write_adapter(tmp_path / "adapters" / f"a{number}", factors)
    start = f"own={tmp_path / 'adapters' / 'a2'}"
    first = LoraAdapter(lora_id=7, lora_name="first", source_path=str(tmp_path / "adapters" / "a1"))
    flags = {**FLAGS, "lora": start, "lora_folder": tmp_path / "adapters", "max_loras": 2}

    async def tokens_of(inference, lora_name):
        request = GenerateRequest(
            token_ids={"ids": [5, 6, 7, 8]}, lora_name=lora_name,
            sampling={"temperature": 0}, stopping={"max_tokens": 12, "ignore_eos": True},
        )  # fmt: skip
        told = [each async for each in inference.Generate(request)]
        return [info.token_id for each in told for info in each.token.tokens]

    async def code_of(call):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code()

    async with (
        start_engine(**flags) as engine,
        grpc.aio.insecure_channel(engine.address) as channel,
    ):
        control, inference = ControlStub(channel), InferenceStub(channel)
        assert (await control.GetModelInfo(GetModelInfoRequest())).supports_lora
        info = await control.GetServerInfo(openengine_pb2.GetServerInfoRequest())
        assert info.capacity.max_loras == 2
        for is_again in (False, True):
            loaded = await control.LoadLora(LoadLoraRequest(adapter=first))
            assert (loaded.adapter, loaded.already_loaded) == (first, is_again)
        base, adapted, own = [await tokens_of(inference, name) for name in ("", "first", "own")]
        assert base != adapted != own != base
        listed = (await control.ListLoras(ListLorasRequest())).adapters
        assert [each.lora_name for each in listed] == ["first", "own"]
        assert listed[0] == first
        assert listed[1].lora_id > 0
        for changed, code in (
            ({"lora_id": 0}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"source_path": "a1"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"lora_name": "other"}, grpc.StatusCode.ALREADY_EXISTS),
            ({"lora_id": 8}, grpc.StatusCode.ALREADY_EXISTS),
            (
                {"lora_id": 8, "lora_name": "x", "source_path": "/"},
                grpc.StatusCode.PERMISSION_DENIED,
            ),
        ):
            wrong = LoraAdapter(
                **{"lora_id": 7, "lora_name": "first", "source_path": first.source_path, **changed}
            )
            assert await code_of(control.LoadLora(LoadLoraRequest(adapter=wrong))) is code
        unload = UnloadLoraRequest(lora_name="first")
        assert (await control.UnloadLora(unload)).adapter == first
        assert await code_of(control.UnloadLora(unload)) is grpc.StatusCode.NOT_FOUND
        assert await code_of(tokens_of(inference, "first")) is grpc.StatusCode.NOT_FOUND


@contextmanager
def program(log, *command, **environment):
    """Runs a program in a session of its own until the end of the block."""
    process = subprocess.Popen(
        command,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not DYNAMO, reason="OCTAVO_DYNAMO_PYTHON names no interpreter with ai-dynamo")
async def test_dynamo_drives_an_engine(tmp_path):
    folder, port = shutil.copytree(TINY_CHECKPOINT, tmp_path / "tiny"), free_port()
    url = f"http://127.0.0.1:{port}/v1"
    planes = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
    }
    sidecar = ("-m", "dynamo.trtllm.sidecar", "--model-path", str(folder), "--grpc-endpoint")
    frontend = ("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))
    body = {
        "model": str(folder),
        "messages": [{"role": "user", "content": "What is 7 + 5?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    with ExitStack() as running:
        log = running.enter_context((tmp_path / "log").open("wb"))
        engine = running.enter_context(start_engine(model=folder, **FLAGS))
        running.enter_context(program(log, DYNAMO, *frontend, **planes))
        running.enter_context(program(log, DYNAMO, *sidecar, engine.address, **planes))
        client = running.enter_context(httpx.Client(timeout=60))

        def is_served() -> bool:
            with suppress(httpx.TransportError):
                answer = client.post(f"{url}/chat/completions", json=body)
                return answer.status_code == httpx.codes.OK
            return False

        await until(is_served, timeout_s=120)
        answer = client.post(f"{url}/chat/completions", json=body).json()
        assert "12" in answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] > 0
        with client.stream("POST", f"{url}/chat/completions", json=body | {"stream": True}) as sent:
            lines = [line for line in sent.iter_lines() if line.startswith("data: {")]
        assert len(lines) > 3
        endless = body | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", f"{url}/chat/completions", json=endless) as sent:
            next(sent.iter_lines())
        # Dynamo passes the end of the client's stream on.
        await until(lambda: '"finish_reason": "aborted"' in engine.log)
