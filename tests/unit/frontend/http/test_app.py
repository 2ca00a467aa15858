"""The HTTP API over loopback: what is answered, what is refused, and how requests end."""

import asyncio
import contextlib
import json

import httpx
import pytest
import structlog

from protos.common.v1.failure_pb2 import Failure
from services.frontend.config import FrontendConfig
from services.frontend.http.bodies import reader as body_reader
from services.frontend.http.chat import calls as chat_calls
from services.frontend.server import FrontendServer
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "fake", "prompt": "one two"}
ENDLESS = says("one two " * 100, eos=False)


@contextlib.asynccontextmanager
async def http_stack(engine: FakeEngine | None = None, **config: object):
    async with (
        engine or FakeEngine() as running,
        frontend_stack(running, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield stack, client


async def events_of(response: httpx.Response) -> list[dict]:
    """The events of a stream that ends well."""
    lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_conversation_is_answered():
    async with http_stack() as (_, client):
        response = await client.post("/v1/chat/completions", json=CHAT)
    body = response.json()
    [choice] = body["choices"]
    assert response.status_code == 200
    assert response.headers["x-request-id"] == body["id"]
    assert body["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_stream_says_who_speaks_then_the_text_then_the_usage():
    wish = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        http_stack() as (_, client),
        client.stream("POST", "/v1/chat/completions", json=wish) as response,
    ):
        chunks = await events_of(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-3:-1]] == [None, "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_stream_sends_no_usage_unless_asked():
    wish = COMPLETION | {"stream": True}
    async with (
        http_stack() as (_, client),
        client.stream("POST", "/v1/completions", json=wish) as response,
    ):
        chunks = await events_of(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_completion_takes_token_ids_as_they_are_and_ends_at_its_limit():
    ids = reference_tokenizer().encode("hello").ids
    engine = FakeEngine(script=lambda prompt: prompt * 9)
    async with http_stack(engine) as (_, client):
        body = (
            await client.post(
                "/v1/completions", json=COMPLETION | {"prompt": ids, "max_tokens": 2 * len(ids)}
            )
        ).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hellohello", "length")
    assert body["object"] == "text_completion"


async def test_every_wish_reaches_the_engine():
    wishes = {
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 7,
        "frequency_penalty": 1.5,
        "presence_penalty": -0.5,
        "logit_bias": {"3": -100},
        "top_k": 4,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
    }
    async with http_stack() as (stack, client):
        neutral = {"n": 1, "tools": None, "response_format": {"type": "text"}}
        chat = CHAT | wishes | neutral | {"max_completion_tokens": 5, "logprobs": True}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    sampling = stack.engine.submits[0].sampling
    told = {field.name: value for field, value in sampling.ListFields()}
    expected = wishes | {"max_tokens": 5, "logprobs": 0, "logit_bias": {3: -100}}
    assert {name: dict(v) if name == "logit_bias" else v for name, v in told.items()} == expected
    assert stack.engine.submits[1].sampling.max_tokens == 16


async def test_a_stop_string_ends_the_text_and_is_left_out():
    engine = FakeEngine(script=says("one two three four", eos=False))
    async with http_stack(engine) as (_, client):
        body = (await client.post("/v1/completions", json=COMPLETION | {"stop": "three"})).json()
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")


async def test_log_probabilities_follow_the_text_of_a_chat():
    wish = CHAT | {"logprobs": True}
    async with http_stack() as (_, client):
        body = (await client.post("/v1/chat/completions", json=wish)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "hello world"
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b"hello world"
    assert {entry["logprob"] for entry in content} == {-0.5}


async def test_log_probabilities_of_a_completion_say_where_tokens_begin():
    text = "h\N{LATIN SMALL LETTER E WITH ACUTE}llo"
    async with http_stack(FakeEngine(script=says(text))) as (_, client):
        body = (await client.post("/v1/completions", json=COMPLETION | {"logprobs": 0})).json()
        streamed = await client.post(
            "/v1/completions", json=COMPLETION | {"logprobs": 0, "stream": True}
        )
    told = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == text
    assert told["text_offset"][0] == 0
    whole = [token for token in told["tokens"] if not token.startswith("bytes:")]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token not in whole or text[offset:].startswith(token)
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line[6:7] == "{"]
    offsets = [at for each in chunks for at in each["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == told["text_offset"]


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        ("/v1/chat/completions", {"n": 33}, "n"),
        ("/v1/chat/completions", {"n": True}, "n"),
        ("/v1/chat/completions", {"user": 1}, "user"),
        ("/v1/chat/completions", {"functions": []}, "functions"),
        ("/v1/chat/completions", {"seed": -(2**63) - 1}, "seed"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", {"temperature": 3}, "temperature"),
        ("/v1/chat/completions", {"temperature": "1"}, "temperature"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"stream_options": {}}, "stream_options"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/chat/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
        ),
        ("/v1/completions", {"prompt": ["one"] * 33}, "prompt"),
        ("/v1/completions", {"prompt": ["one"] * 17, "n": 2}, "prompt"),
        ("/v1/completions", {"prompt": ["one", [1]]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"n": 2, "best_of": 3}, "best_of"),
        ("/v1/completions", {"echo": True, "logprobs": 1, "n": 2}, "echo"),
        (
            "/v1/completions",
            {"echo": True, "logprobs": 1, "prompt_logprobs": 1},
            "prompt_logprobs",
        ),
        ("/v1/completions", {"echo": "yes"}, "echo"),
        ("/v1/completions", {"suffix": "end"}, "suffix"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"model": None}, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(path, change, field):
    body = (CHAT if "chat" in path else COMPLETION) | change
    async with http_stack() as (stack, client):
        response = await client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert field in error["message"]
    assert not stack.engine.submits


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a":' * 5000, b'{"model": "\xff"}'])
async def test_a_body_that_is_no_request_is_refused(content):
    headers = {"content-type": "application/json"}
    async with http_stack() as (_, client):
        response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_message_parts_of_text_are_put_together():
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    async with http_stack(FakeEngine(script=lambda prompt: prompt)) as (stack, client):
        for content in ("hello", parts):
            chat = CHAT | {"messages": [{"role": "user", "content": content}]}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    first, second = stack.engine.submits
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_large_bodies_other_types_other_paths_and_methods_are_refused():
    async with http_stack(max_message_bytes=2**16) as (_, client):
        large = await client.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 2**17})
        typed = await client.post("/v1/completions", content=json.dumps(COMPLETION))
        path = await client.get("/v1/nothing")
        method = await client.get("/v1/completions")
        embeddings = await client.post("/v1/embeddings", json={"model": "fake", "input": "x"})
    answers = [large, typed, path, method, embeddings]
    assert [answer.status_code for answer in answers] == [413, 415, 404, 405, 400]
    assert all(answer.json()["error"]["message"] for answer in answers)
    assert embeddings.json()["error"]["code"] == "unsupported_endpoint"


async def test_models_and_health_are_reported():
    async with http_stack() as (stack, client):
        models = (await client.get("/v1/models")).json()
        model = (await client.get("/v1/models/fake")).json()
        unknown = await client.get("/v1/models/other")
        assert (await client.get("/health")).status_code == 200
        stack.server.begin_drain()
        assert (await client.get("/health")).status_code == 503
    assert models == {"object": "list", "data": [model]}
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 512)
    assert unknown.status_code == 404


async def test_another_model_is_not_found():
    async with http_stack() as (_, client):
        response = await client.post("/v1/completions", json=COMPLETION | {"model": "other"})
    error = response.json()["error"]
    assert response.status_code == 404
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("failure", "status", "retry_after"),
    [
        (Failure(code=3, message="bad"), 400, None),
        (Failure(code=4, message="late"), 504, None),
        (Failure(code=8, message="full", retry_after_ms=2500), 429, "3"),
        (Failure(code=8, message="full"), 429, "1"),
        (Failure(code=14, message="away"), 503, "1"),
        (Failure(code=13, message="a secret"), 500, None),
    ],
)
async def test_the_engines_refusals_have_their_status(failure, status, retry_after):
    async with http_stack(FakeEngine(rejection=failure)) as (_, client):
        response = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    error = response.json()["error"]
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert ("secret" in response.text) is False
    assert error["message"] == failure.message or status == 500


async def test_a_failure_in_a_stream_is_its_last_event():
    engine = FakeEngine(failure=Failure(code=14, message="the worker died"))
    async with http_stack(engine) as (_, client):
        response = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    last = response.text.strip().split("\n\n")[-1]
    assert response.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the worker died"


async def test_without_an_engine_it_says_so():
    engine = FakeEngine()
    await engine.start()
    await engine.die()
    async with (
        frontend_stack(engine, wait_ready=False, http_port=0) as stack,
        stack.http_client() as client,
    ):
        response = await client.post("/v1/completions", json=COMPLETION)
        models = await client.get("/v1/models")
        health = await client.get("/health")
    assert (response.status_code, health.status_code) == (503, 503)
    assert models.json()["data"] == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_its_request(stream):
    async with http_stack(FakeEngine(script=ENDLESS)) as (stack, client):
        stack.engine.pause()
        wish = COMPLETION | {"stream": stream, "max_tokens": 500}
        call = asyncio.create_task(client.post("/v1/completions", json=wish))
        await until(lambda: stack.engine.live)
        call.cancel()
        await until(lambda: not stack.engine.live)
    assert len(stack.engine.aborted) == 1


async def test_requests_over_the_limit_are_refused_and_the_slot_is_free_again():
    async with http_stack(FakeEngine(script=ENDLESS), max_live_requests=1) as (stack, client):
        stack.engine.pause()
        first = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: stack.engine.live)
        refused = await client.post("/v1/completions", json=COMPLETION)
        stack.engine.resume()
        assert (await first).status_code == 200
        again = await client.post("/v1/completions", json=COMPLETION)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert again.status_code == 200


async def test_a_drain_lets_requests_finish_and_refuses_new_ones():
    async with http_stack(FakeEngine(script=ENDLESS)) as (stack, client):
        stack.engine.pause()
        running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: stack.engine.live)
        stack.server.begin_drain()
        refused = await client.post("/v1/completions", json=COMPLETION)
        draining = asyncio.create_task(stack.server.drain())
        stack.engine.resume()
        assert (await running).status_code == 200
        await draining
    assert refused.status_code == 503


async def test_requests_left_after_the_drain_are_reported():
    async with http_stack(FakeEngine(script=ENDLESS), drain_timeout_s=0) as (stack, client):
        stack.engine.pause()
        running = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: stack.engine.live)
        await stack.server.drain()
        await stack.server.close()
        assert (await running).status_code == 503


async def test_a_drain_does_not_wait_for_connections_without_a_request():
    async with http_stack(drain_timeout_s=3600) as (stack, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        await client.get("/health")
        async with asyncio.timeout(60):
            await stack.server.drain()
            await stack.server.close()
        assert await reader.read() == b""
        writer.close()


async def test_http_is_off_unless_it_is_asked_for():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        assert stack.server.http_port is None


async def test_requests_are_logged_without_their_text():
    with structlog.testing.capture_logs() as lines:
        async with http_stack() as (_, client):
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/chat/completions", json=CHAT | {"n": "hello"})
    finished = [line for line in lines if line["event"] == "request_finished"]
    assert [line["method"] for line in finished] == ["HttpChat"]
    assert "hello" not in json.dumps(lines, default=str)


async def test_a_port_that_is_taken_is_an_error_at_the_start():
    async with http_stack() as (stack, _):
        config = FrontendConfig(
            port=0, http_port=stack.server.http_port, engine_address=stack.engine.address
        )
        second = FrontendServer(config)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("path", "wish"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_a_huge_n_is_refused_before_memory_is_allocated_for_each_sample(path, wish):
    async with http_stack() as (_, client):
        response = await client.post(path, json=wish | {"n": 10**12})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


async def test_a_large_body_is_not_read_on_the_event_loop(monkeypatch):
    sizes = []

    def record(request_class, body, **settings):
        sizes.append(len(body))
        return parse(request_class, body, **settings)

    parse = chat_calls.parse
    monkeypatch.setattr(chat_calls, "parse", record)
    monkeypatch.setattr(body_reader, "START_TIMEOUT_S", 60.0)
    monkeypatch.setattr(body_reader, "READ_TIMEOUT_S", 60.0)
    objects = b'{"x":[' + b"{}," * 4_500_000 + b"{}]}"
    body = json.dumps(CHAT | {"tools": [{"type": "function", "function": {"name": "a"}}]}).encode()
    body = body.replace(b'"name": "a"', b'"name": "a", "parameters": ' + objects)
    long = json.dumps(CHAT).encode() + b" " * 2**20
    async with http_stack() as (_, client):
        headers = {"content-type": "application/json"}
        refused = await client.post("/v1/chat/completions", content=body, headers=headers)
        served = await client.post("/v1/chat/completions", content=long, headers=headers)
        assert sizes == []
        await client.post("/v1/chat/completions", json=CHAT)
    assert len(sizes) == 1
    assert refused.status_code == 400
    assert "over 65536 objects and lists" in refused.json()["error"]["message"]
    assert served.json()["choices"][0]["message"]["content"] == "hello world"
