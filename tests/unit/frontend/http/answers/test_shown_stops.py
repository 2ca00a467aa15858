"""The text of an output ends with the stop string or token where the caller asks for it."""

import json

import pytest

from protos.frontend.v1 import frontend_pb2
from tests.support.byte_tokenizer import TOOL_TEMPLATE, reference_tokenizer, tokenizer_files
from tests.support.fake_engine import EOS_TOKEN_ID, FakeEngine, says
from tests.unit.frontend.http.test_app import CHAT, COMPLETION, events_of, http_stack
from tests.unit.frontend.test_replies import TEMPLATE

TEXT = "one two three four"
SHOWN = {"include_stop_str_in_output": True}


def engine(text=TEXT, *, ends_with=None, template=TEMPLATE):
    ids = reference_tokenizer().encode(text).ids
    script = says(text) if ends_with is None else lambda _: [*ids, *ends_with]
    return FakeEngine(script=script, files=tokenizer_files(chat_template=template))


def text_of(choice):
    message = choice.get("message", choice.get("delta"))
    return (choice.get("text") if message is None else message.get("content")) or ""


@pytest.mark.parametrize("stop", ["wo thr", "two", " t", "w", "four"])
@pytest.mark.parametrize(
    ("path", "body", "template"),
    [
        ("/v1/completions", COMPLETION, TEMPLATE),
        ("/v1/chat/completions", CHAT, TEMPLATE),
        ("/v1/chat/completions", CHAT, TOOL_TEMPLATE),
    ],
    ids=["completion", "chat read as a reply", "chat"],
)
async def test_the_stop_string_ends_the_text(path, body, template, stop):
    wish = body | SHOWN | {"stop": [stop, "never"]}
    async with http_stack(engine(template=template)) as (_, client):
        whole = (await client.post(path, json=wish)).json()
        hidden = (await client.post(path, json=wish | {"include_stop_str_in_output": False})).json()
        async with client.stream("POST", path, json=wish | {"stream": True}) as response:
            chunks = await events_of(response)
    before = TEXT[: TEXT.index(stop)]
    streamed = "".join(text_of(chunk["choices"][0]) for chunk in chunks)
    assert text_of(whole["choices"][0]) == streamed == before + stop
    assert text_of(hidden["choices"][0]).rstrip() == before.rstrip()
    assert whole["usage"] == hidden["usage"]
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_nothing_is_held_back_that_may_begin_a_stop_string():
    wish = COMPLETION | SHOWN | {"stop": [TEXT + "!"], "stream": True}
    running = engine()
    running.hold_at = 2
    async with (
        http_stack(running) as (_, client),
        client.stream("POST", "/v1/completions", json=wish) as response,
    ):
        seen = ""
        async for line in response.aiter_lines():
            seen += line
            if "on" in line:
                break
    assert '"text":"' in seen


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stop_token_ends_the_text_if_it_is_visible(path):
    body = COMPLETION | {"logprobs": 0} if "chat" not in path else CHAT | {"logprobs": True}
    [stop_id] = reference_tokenizer().encode("!").ids
    for ends_with, visible in (([stop_id], "!"), ([EOS_TOKEN_ID], "")):
        async with http_stack(engine(ends_with=ends_with)) as (_, client):
            wish = body | {"stop_token_ids": ends_with}
            shown = (await client.post(path, json=wish | SHOWN)).json()["choices"][0]
            hidden = (await client.post(path, json=wish)).json()["choices"][0]
        assert shown["finish_reason"] == hidden["finish_reason"] == "stop"
        assert text_of(hidden) == TEXT
        assert text_of(shown) == TEXT + visible
        for choice, text in ((shown, TEXT + visible), (hidden, TEXT)):
            told = choice["logprobs"]
            tokens = told.get("tokens") or [entry["token"] for entry in told["content"]]
            assert "".join(tokens) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_stop_reason_is_the_stop_string_or_the_requests_own_stop_token(path, stream):
    body = COMPLETION if "chat" not in path else CHAT
    [stop_id] = reference_tokenizer().encode("!").ids
    cases = [
        ([stop_id], {"stop_token_ids": [7, stop_id]}, stop_id),
        ([stop_id], {"stop_token_ids": [stop_id], "stop": ["three"]}, "three"),
        ([EOS_TOKEN_ID], {"stop_token_ids": [EOS_TOKEN_ID]}, EOS_TOKEN_ID),
        ([EOS_TOKEN_ID], {"stop_token_ids": [stop_id], "stop": ["never"]}, None),
        ([EOS_TOKEN_ID], {"max_tokens": 2}, None),
    ]
    for ends_with, changes, reason in cases:
        async with http_stack(engine(ends_with=ends_with)) as (_, client):
            answer = await client.post(path, json=body | changes | {"n": 2, "stream": stream})
        if stream:
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for line in lines for choice in json.loads(line)["choices"]]
            assert {"stop_reason" in each for each in choices if not each["finish_reason"]} == {
                False
            }
            choices = [each for each in choices if each["finish_reason"]]
        else:
            choices = answer.json()["choices"]
        assert [each["stop_reason"] for each in choices] == [reason] * 2


async def test_the_stop_string_is_shown_over_grpc_and_the_stop_token_with_special_tokens():
    def request(**options):
        return frontend_pb2.GenerateRequest(text="x", options={"show_stop": True, **options})

    async with http_stack(engine()) as (stack, _):
        for options, text in (
            ({"stop": ["tw"]}, "one tw"),
            ({}, TEXT),
            ({"show_special_tokens": True}, f"{TEXT}<|im_end|>"),
        ):
            call = stack.stub.Generate(request(**options))
            outputs = [response.output async for response in call]
            assert "".join(output.text for output in outputs) == text
            assert outputs[-1].stop_string == options.get("stop", [""])[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_special_tokens_are_shown_where_the_caller_asks_for_them(path):
    body = COMPLETION | {"logprobs": 0} if "chat" not in path else CHAT
    text = "one<|im_start|> two"
    async with http_stack(engine(text)) as (_, client):
        wish = body | {"skip_special_tokens": False}
        shown = (await client.post(path, json=wish)).json()["choices"][0]
        ended = (await client.post(path, json=wish | SHOWN)).json()["choices"][0]
        hidden = (await client.post(path, json=body)).json()["choices"][0]
    assert (text_of(shown), text_of(ended)) == (text, f"{text}<|im_end|>")
    assert text_of(hidden) == "one two"
    if "chat" not in path:
        for choice in (shown, ended):
            told = choice["logprobs"]
            pairs = zip(told["tokens"], told["text_offset"], strict=True)
            assert all(choice["text"].startswith(token, offset) for token, offset in pairs)
