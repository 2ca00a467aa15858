"""Structured output over a real socket: real grammars, a fake worker that obeys masks."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import grpc
import jsonschema
import pytest
import tokenizers

from protos.common.v1.sampling_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    SamplingParams,
    StructuredOutput,
    TextChoice,
)
from protos.engine.v1.engine_pb2 import Abort, GenerateRequest
from services.engine.checkpoint.model_folder import ModelFolder
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.edge.structured_output import structured_output_of
from services.engine.grammar.compiler import LIVE
from services.engine.grammar.probe_pool import ProbePool
from tests.support.engine_harness import engine_config, running_service
from tests.support.passing_time import pass_time
from tests.support.waiting import until
from tests.unit.engine.rpc.test_session import Frontend

MODEL = ModelFolder.open(TINY_CHECKPOINT, name="tiny", max_model_len=None)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOSTILE = json.dumps({"type": "integer", "multipleOf": 99999989})


@asynccontextmanager
async def tiny_service(**config):
    settings = engine_config(num_kv_blocks=256, max_model_len=512, **config)
    async with running_service(settings, model=MODEL, vocab_size=MODEL.vocab_size) as service:
        yield service


def decoded(token_ids):
    return tokenizers.Tokenizer.from_buffer(MODEL.tokenizer_json).decode(list(token_ids))


async def generate(service, *, max_tokens=200, seed=3, **wanted):
    sampling = SamplingParams(
        seed=seed, max_tokens=max_tokens, structured_output=StructuredOutput(**wanted)
    )
    call = service.stub.Generate(GenerateRequest(prompt_token_ids=[5, 6], sampling=sampling))
    responses = [response async for response in call]
    token_ids = [t for response in responses for t in response.token_ids]
    return decoded(token_ids), responses[-1]


async def test_the_output_follows_its_regex_and_stops_where_nothing_can_follow():
    async with tiny_service() as service:
        text, last = await generate(service, regex="[0-9]{4}-[0-9]{2}")
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", text)
        assert last.finish_reason == FINISH_REASON_STOP
        assert last.usage.output_tokens > 0
        assert not last.HasField("stop_token_id")


async def test_the_output_is_one_of_a_choice():
    async with tiny_service() as service:
        texts = ["yes", "no", "perhaps so"]
        text, _ = await generate(service, choice=TextChoice(texts=texts))
        assert text in texts


async def test_what_a_schema_asks_for_comes_or_is_cut_at_max_tokens():
    async with tiny_service() as service:
        for seed in range(6):
            text, last = await generate(
                service, seed=seed, max_tokens=400, json_schema=json.dumps(SCHEMA)
            )
            if last.finish_reason == FINISH_REASON_STOP:
                jsonschema.validate(json.loads(text), SCHEMA)
            else:
                assert last.finish_reason == FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        ({"structured_output": {}}, "is empty"),
        ({"structured_output": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_output": {"json_object": False}}, "json_object is false"),
        ({"structured_output": {"regex": ""}}, "empty text"),
        ({"structured_output": {"choice": {}}}, "has 0 texts"),
        ({"structured_output": {"lark": "x" * 100}}, "has 100 bytes; the limit is 99"),
        ({"structured_output": {"json_schema": "{"}}, "cannot be read"),
        ({"structured_output": {"regex": "("}}, "the grammar is refused"),
    ],
)
async def test_what_cannot_be_followed_is_refused_before_any_message(sampling, why):
    await assert_refused(sampling, why)


async def test_what_compiles_for_minutes_is_refused_at_its_time_limit():
    sampling = {"structured_output": {"json_schema": HOSTILE}}
    await assert_refused(sampling, "compiling it took over 1 s", grammar_timeout_s=1.0)


async def assert_refused(sampling, why, **config):
    async with tiny_service(max_grammar_bytes=99, **config) as service:
        call = service.stub.Generate(
            GenerateRequest(prompt_token_ids=[1], sampling=SamplingParams(**sampling))
        )
        with pytest.raises(grpc.aio.AioRpcError, match=re.escape(why)) as caught:
            [message async for message in call]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_session_goes_on_while_a_grammar_is_compiled(monkeypatch):
    async with tiny_service() as service:
        await generate(service, regex="a")  # a process that compiles is there
        frontend = await Frontend(service.stub).open()
        hostile = StructuredOutput(json_schema=HOSTILE)
        await frontend.submit(1, sampling={"structured_output": hostile})
        await frontend.submit(2)
        await frontend.read_until(lambda f: 2 in f.finished)
        assert 1 not in frontend.rejected
        pass_time(monkeypatch, 30)
        await frontend.read_until(lambda f: 1 in f.rejected)
        assert frontend.rejected[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_a_request_can_be_aborted_while_its_grammar_is_compiled_and_its_handle_is_free(
    monkeypatch,
):
    async with tiny_service() as service:
        await generate(service, regex="a")  # a process that compiles is there
        frontend = await Frontend(service.stub).open()
        hostile = StructuredOutput(json_schema=HOSTILE)
        await frontend.submit(1, sampling={"structured_output": hostile})
        await frontend.send(abort=Abort(handles=[1]))
        await frontend.submit(2)
        await frontend.read_until(lambda f: 2 in f.finished)
        pass_time(monkeypatch, 30)  # the compilation goes on to its limit
        await frontend.read_until(lambda f: 1 in f.rejected)
        await frontend.submit(1)
        await frontend.read_until(lambda f: 1 in f.finished)


async def test_a_session_of_a_draining_engine_answers_for_a_grammar_that_is_compiled(monkeypatch):
    check, may_go_on = ProbePool.check, asyncio.Event()

    async def wait_and_check(self, wanted):
        await may_go_on.wait()
        return await check(self, wanted)

    monkeypatch.setattr(ProbePool, "check", wait_and_check)
    async with tiny_service() as service:
        frontend = await Frontend(service.stub).open()
        wanted = StructuredOutput(regex="a{3}")
        await frontend.submit(1, sampling={"structured_output": wanted})
        await until(lambda: service.server._grammars._counts.held(LIVE))
        await service.core.drain.run(60)
        await frontend.read_until(lambda f: f.is_draining)
        may_go_on.set()
        await frontend.read_until(lambda f: 1 in f.rejected)
        assert frontend.rejected[1].code == grpc.StatusCode.UNAVAILABLE.value[0]


async def test_no_task_or_block_is_left_of_a_session_that_ends_in_the_middle(monkeypatch):
    async with tiny_service() as service:
        await until(lambda: service.core.is_ready)
        frontend = await Frontend(service.stub).open()
        endless = {"structured_output": StructuredOutput(regex="a{1000}")}
        await frontend.submit(1, sampling=endless, max_tokens=200)
        await frontend.read_until(lambda f: 1 in f.tokens)
        hostile = StructuredOutput(json_schema=HOSTILE)
        await frontend.submit(2, sampling={"structured_output": hostile})
        frontend.call.cancel()
        await until(lambda: service.core.load().num_running == 0)
        assert service.core.load().num_free_blocks == 255
        assert service.core.counters.finished["aborted"] == 1
        pass_time(monkeypatch, 30)  # the compilation goes on to its limit


async def test_requests_with_and_without_a_grammar_run_side_by_side():
    async with tiny_service() as service:
        texts = await asyncio.gather(
            *(generate(service, seed=seed, regex="[a-z]{5}") for seed in range(4)),
        )
        assert all(re.fullmatch("[a-z]{5}", text) for text, _ in texts)


def test_choices_are_bounded():
    message = StructuredOutput(choice=TextChoice(texts=["x"] * 1025))
    with pytest.raises(Exception, match="1025 texts"):
        structured_output_of(message, 10**6)


def test_a_beginning_needs_no_preamble_and_counts_with_the_form():
    begun = structured_output_of(StructuredOutput(regex="a+", begun="aa"), 10)
    assert (begun.texts, begun.begun) == (("a+",), "aa")
    with pytest.raises(Exception, match="begun cannot go with a preamble"):
        structured_output_of(StructuredOutput(regex="a", begun="a", preamble={"end": "."}), 10)
    with pytest.raises(Exception, match="has 11 bytes"):
        structured_output_of(StructuredOutput(regex="a+", begun="a" * 9), 10)
