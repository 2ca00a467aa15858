"""The foreign protocol through its own stubs, over a real socket, around a fake worker."""

import hashlib
import io
import re
import sys
import zipfile
from contextlib import asynccontextmanager

import grpc
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated.vllm_engine_pb2 import GenerateRequest

from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.request import SamplingParams
from services.engine.server import VLLM_SERVICE_NAME
from tests.support.engine_harness import SEED, engine_config, model_folder, running_service
from tests.support.fake_worker import expected_output
from tests.support.waiting import until

TINY = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)
PROMPT = (1, 2, 3)
LONG = 200


@asynccontextmanager
async def gateway(config=None, **options):
    settings = engine_config(vllm_grpc=True, **(config or {}))
    async with running_service(settings, **options) as service:
        yield service, vllm_engine_pb2_grpc.VllmEngineStub(service.channel)


def ask(*, prompt=PROMPT, request_id="r", stream=False, **sampling):
    return GenerateRequest(
        request_id=request_id,
        tokenized={"input_ids": prompt},
        sampling_params={"seed": SEED, "max_tokens": 8, **sampling},
        stream=stream,
    )


def expected(max_tokens=8, index=0):
    return expected_output(PROMPT, SamplingParams(seed=SEED + index, max_tokens=max_tokens))


async def responses(call):
    told = []
    while (response := await call.read()) is not grpc.aio.EOF:
        told.append(response)
    return told


def decoded(token_ids):
    return tokenizers.Tokenizer.from_buffer(TINY.tokenizer_json).decode(list(token_ids))


async def completes(call):
    told = [response.complete for response in await responses(call)]
    return sorted(told, key=lambda complete: complete.index)


async def test_an_output_that_is_not_streamed_comes_as_a_whole():
    async with gateway() as (_, stub):
        [complete] = await completes(stub.Generate(ask()))
        assert list(complete.output_ids) == expected()
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.completion_tokens) == (3, 8)
        assert complete.WhichOneof("matched_stop") is None


async def test_a_stream_sends_each_token_once_and_ends_with_a_reason():
    async with gateway() as (_, stub):
        told = await responses(stub.Generate(ask(stream=True)))
        assert [response.WhichOneof("response") for response in told[-2:]] == ["chunk", "complete"]
        chunks, complete = [response.chunk for response in told[:-1]], told[-1].complete
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected()
        assert sum(chunk.completion_tokens for chunk in chunks) == complete.completion_tokens == 8
        assert complete.finish_reason == "length"
        assert not complete.output_ids


async def test_several_outputs_have_the_seeds_after_the_first_one():
    async with gateway() as (service, stub):
        told = await completes(stub.Generate(ask(n=3)))
        assert [list(complete.output_ids) for complete in told] == [
            expected(index=index) for index in range(3)
        ]
        assert service.core.load().num_running == 0


async def test_a_stop_token_of_the_request_is_named_and_an_end_of_sequence_is_not():
    fourth = expected()[3]
    async with gateway() as (_, stub):
        [complete] = await completes(stub.Generate(ask(stop_token_ids=[fourth])))
        assert complete.finish_reason == "stop"
        assert complete.matched_token_id == fourth
    async with gateway(model=model_folder(eos_token_ids=frozenset({fourth}))) as (_, stub):
        [complete] = await completes(stub.Generate(ask()))
        assert complete.finish_reason == "stop"
        assert complete.WhichOneof("matched_stop") is None


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_output_and_prompt(stream):
    async with gateway() as (_, stub):
        call = stub.Generate(ask(stream=stream, logprobs=2, prompt_logprobs=1))
        told = [getattr(r, r.WhichOneof("response")) for r in await responses(call)]
        outputs = [part.output_logprobs for part in told]
        assert [token_id for part in outputs for token_id in part.token_ids] == expected()
        tops = [top for part in outputs for top in part.top_logprobs]
        assert [len(top.values) for top in tops] == [2] * 8
        [prompt] = [part.input_logprobs for part in told if part.HasField("input_logprobs")]
        assert tuple(prompt.token_ids) == PROMPT
        known = [entry.HasField("value") for entry in prompt.token_logprobs]
        assert known == [False, True, True]
        assert [len(top.values) for top in prompt.top_logprobs] == [0, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_request_with_the_token_that_completes_it(stream):
    options = {"model": TINY, "vocab_size": TINY.vocab_size}
    async with gateway(**options) as (service, stub):
        [whole] = await completes(stub.Generate(ask(max_tokens=40)))
        stop = re.findall("[a-z]{3}", decoded(whole.output_ids)[10:])[0]
        call = stub.Generate(ask(max_tokens=LONG, stop=[stop], stream=stream))
        told = await responses(call)
        complete = told[-1].complete
        streamed = [token_id for response in told for token_id in response.chunk.token_ids]
        token_ids = streamed or list(complete.output_ids)
        assert token_ids == list(whole.output_ids)[: len(token_ids)]
        assert stop in decoded(token_ids)
        assert stop not in decoded(token_ids[:-1])
        assert (complete.finish_reason, complete.matched_stop_str) == ("stop", stop)
        assert complete.completion_tokens == len(token_ids)
        await until(lambda: service.core.load().num_running == 0)


async def test_the_output_follows_a_grammar():
    async with gateway(model=TINY, vocab_size=TINY.vocab_size) as (_, stub):
        call = stub.Generate(ask(n=2, regex="[0-9]{4}", max_tokens=20))
        for complete in await completes(call):
            assert re.fullmatch("[0-9]{4}", decoded(complete.output_ids))


async def test_abort_ends_every_output_and_reports_it():
    async with gateway(num_steps=1) as (service, stub):
        call = stub.Generate(ask(n=2, max_tokens=LONG, stream=True))
        await call.read()
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["unknown", "r"]))
        told = [part.complete for part in await responses(call) if part.HasField("complete")]
        assert [complete.finish_reason for complete in told] == ["abort", "abort"]
        assert service.core.load().num_running == 0


async def test_a_caller_that_leaves_ends_its_requests_and_frees_its_name():
    async with gateway(num_steps=1) as (service, stub):
        call = stub.Generate(ask(n=2, max_tokens=LONG, stream=True))
        await call.read()
        call.cancel()
        await until(lambda: service.core.counters.finished["aborted"] == 2)
        service.executors.last.resume()
        [complete] = await completes(stub.Generate(ask()))
        assert complete.finish_reason == "length"


async def test_a_name_belongs_to_one_live_request():
    async with gateway(num_steps=1) as (_, stub):
        call = stub.Generate(ask(max_tokens=LONG, stream=True))
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses(stub.Generate(ask()))
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]))
        assert (await responses(call))[-1].complete.finish_reason == "abort"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (ask(prompt=()), "the prompt is empty"),
        (ask(prompt=range(256)), "the prompt has 256 tokens"),
        (ask(prompt=[1000]), "token id 1000"),
        (ask(temperature=101), "temperature is 101"),
        (ask(logprobs=21), "logprobs is 21"),
        (ask(max_tokens=0), "max_tokens is 0"),
        (ask(structural_tag="{}"), "structural_tag is not served"),
        (ask(stop=["a"]), "the engine cannot read this model's tokenizer"),
        (GenerateRequest(text="Once"), "text is not served"),
    ],
)
async def test_what_cannot_be_served_is_refused_before_any_message(request_, why):
    async with gateway() as (service, stub):
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(why)) as caught:
            await responses(stub.Generate(request_))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert service.core.counters.rejected == {"INVALID_ARGUMENT": 1}


async def test_one_output_too_many_for_the_queue_refuses_all_of_them():
    config = {"max_num_waiting": 1, "max_num_seqs": 1}
    async with gateway(config) as (service, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses(stub.Generate(ask(n=8)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: service.core.load().num_running == 0)
        assert service.core.load().num_waiting == 0


async def test_the_model_and_the_engine_describe_themselves():
    async with gateway(model=TINY, vocab_size=TINY.vocab_size) as (service, stub):
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert info.served_model_name == "tiny"
        assert info.max_context_length == TINY.max_model_len
        assert info.vocab_size == TINY.vocab_size
        assert list(info.eos_token_ids) == sorted(TINY.eos_token_ids)
        assert '"temperature": 0.0' in info.default_sampling_params_json
        server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (server.server_type, server.data_parallel_size) == ("octavo", 1)
        assert server.max_num_seqs == 8
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (health.healthy, health.message) == (True, "ready")
        await service.core.drain.run(0)
        health = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "draining")


async def test_loads_report_requests_and_blocks():
    async with gateway(num_steps=1) as (_, stub):
        call = stub.Generate(ask(n=2, max_tokens=LONG, stream=True))
        await call.read()
        answer = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["core"]))
        [load] = answer.loads
        assert load.num_total_reqs == load.num_running_reqs + load.num_waiting_reqs == 2
        assert 0 < load.num_used_tokens < load.max_total_num_tokens
        assert 0 < load.token_usage < 1
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="dp_rank is 1"):
            await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1))


async def test_the_tokenizer_comes_as_an_archive_with_its_hash():
    async with gateway(model=TINY, vocab_size=TINY.vocab_size) as (_, stub):
        chunks = await responses(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        content = b"".join(chunk.data for chunk in chunks)
        hashes = [chunk.sha256 for chunk in chunks]
        assert hashes == [""] * (len(chunks) - 1) + [hashlib.sha256(content).hexdigest()]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for file in TINY.tokenizer.files:
                assert archive.read(file.name) == file.content


async def test_methods_that_the_engine_has_not_are_unimplemented():
    async with gateway() as (_, stub):
        for call in (
            stub.FlushCache(common_pb2.FlushCacheRequest()),
            stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_the_protocol_is_served_only_where_it_is_asked_for():
    async with running_service() as service:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(service.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    check = health_pb2.HealthCheckRequest(service=VLLM_SERVICE_NAME)
    async with gateway() as (service, _):
        answer = await health_pb2_grpc.HealthStub(service.channel).Check(check)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_flag_needs_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    with pytest.raises(ValidationError, match="the extra `gateway` brings"):
        engine_config(vllm_grpc=True)


async def test_a_message_that_cannot_be_parsed_is_the_callers_mistake():
    async with gateway() as (service, _):
        method = service.channel.unary_stream(f"/{VLLM_SERVICE_NAME}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses(method(b"\xff\xff"))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_end_with_the_status_of_a_worker_that_is_lost_for_good():
    config = {"worker_patience_s": 0.05}
    async with gateway(config, num_steps=1) as (service, stub):
        call = stub.Generate(ask(n=2, max_tokens=LONG, stream=True))
        await call.read()
        service.executors.options["start_error"] = "no weights"
        service.executors.last.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await responses(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
