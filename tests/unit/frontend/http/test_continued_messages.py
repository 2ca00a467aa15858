"""Replies that continue the last message: the prompt, the reply's reading, and what is refused."""

import json

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2
from services.client.client import OctavoClient
from services.client.requests import Message, Reply
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.unit.frontend.http.messages.test_messages import prompt_of
from tests.unit.frontend.http.test_app import events_of, http_stack
from tests.unit.frontend.test_replies import PATH, TEMPLATE, TOOLS, running

ASKED = {"role": "user", "content": "6 * 7?"}
BEGUN = "The answer is"
PROMPT = f"<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n{BEGUN}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def body(content=BEGUN, **changes):
    last = {"role": "assistant", "content": content}
    wish = {"model": "fake", "messages": [ASKED, last], "continue_final_message": True}
    return wish | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_generation_prompt": False},
        {"messages": [ASKED, {"role": "assistant", "content": BEGUN, "prefix": True}]},
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": BEGUN[:5]},
                        {
                            "type": "text",
                            "text": BEGUN[5:],
                            "cache_control": {"type": "ephemeral"},
                        },
                    ],
                },
            ]
        },
    ],
    ids=["alone", "without the beginning", "prefix", "parts"],
)
async def test_the_reply_has_the_new_text_alone(changes):
    wish = body(**changes)
    if "prefix" in str(changes):
        del wish["continue_final_message"]
    async with running(" 42\n") as (engine, _, client):
        answer = (await client.post(PATH, json=wish | {"n": 2, "logprobs": True})).json()
        assert prompt_of(engine) == PROMPT
        counted = (await client.post("/tokenize", json=wish)).json()
        async with client.stream("POST", PATH, json=wish | {"stream": True}) as response:
            chunks = await events_of(response)
    for choice in answer["choices"]:
        assert choice["message"] == {"role": "assistant", "content": " 42\n", "refusal": None}
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == " 42\n"
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == " 42\n"


async def test_an_echo_begins_with_the_continued_text():
    async with running(" 42") as (_, _, client):
        answer = (await client.post(PATH, json=body(echo=True, n=2))).json()
        wish = body(echo=True, stream=True)
        async with client.stream("POST", PATH, json=wish) as response:
            chunks = await events_of(response)
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == [f"{BEGUN} 42"] * 2
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert deltas[0] == BEGUN
    assert "".join(deltas) == f"{BEGUN} 42"


async def test_an_empty_message_is_begun_as_any_reply():
    async with running("<think>\nHm.</think>\n\nYes") as (engine, _, client):
        answer = (await client.post(PATH, json=body(""))).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    assert prompt_of(engine) == PROMPT.removesuffix(BEGUN)


@pytest.mark.parametrize(
    ("content", "reply", "reasoning"),
    [("<think>\nLet", " me.\n</think>\n\nYes", " me."), ("<think>\n", "\nSo.</think>Yes", "So.")],
)
async def test_a_reply_may_continue_reasoning(content, reply, reasoning):
    form = {"type": "json_object"}
    async with running(reply) as (engine, _, client):
        answer = (await client.post(PATH, json=body(content))).json()
        await client.post(PATH, json=body(content, response_format=form))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, "Yes")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    preamble = engine.submits[-1].sampling.structured_output.preamble
    assert (preamble.begin, preamble.end) == ("", "</think>")


@pytest.mark.parametrize(
    ("content", "begun"),
    [
        ('{"a": ', '{"a": '),
        ('<think>\nSo.\n</think>\n\n{"a": ', '{"a": '),
        ("<think>So.</think>\n", ""),
        ("<think>So", ""),
        ("", ""),
    ],
)
async def test_a_form_of_output_covers_the_begun_content(content, begun):
    wish = body(content, response_format={"type": "json_object"}, max_reasoning_tokens=5)
    async with running("1}") as (engine, _, client):
        assert (await client.post(PATH, json=wish | {"n": 2})).status_code == 200
        tags = {"type": "structural_tag", "triggers": ["<f"],
                "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}  # fmt: skip
        assert (await client.post(PATH, json=wish | {"response_format": tags})).status_code == 200
    for submit in engine.submits:
        wanted = submit.sampling.structured_output
        assert wanted.begun == begun
        assert not begun or not wanted.HasField("preamble")
    assert len(engine.submits) == 3


async def test_a_form_of_output_covers_the_begun_content_where_no_reply_is_read():
    wish = body('{"a": ', structured_outputs={"regex": ".*"})
    async with running("1}", reply_format="plain", template=PLAIN) as (engine, _, client):
        assert (await client.post(PATH, json=wish)).status_code == 200
        await client.post(PATH, json=wish | {"continue_final_message": False})
    begun, plain = (each.sampling.structured_output for each in engine.submits)
    assert (begun.begun, plain.begun) == ('{"a": ', "")


async def test_calls_may_follow_the_continued_text():
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    wish = body(tools=TOOLS, tool_choice="required")
    async with running(f"\n{call}") as (engine, _, client):
        answer = (await client.post(PATH, json=wish)).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert engine.submits[-1].sampling.structured_output.HasField("tagged")


async def test_calls_that_are_a_whole_reply_cannot_be_demanded_after_a_text():
    wish = body(tools=TOOLS, tool_choice="required")
    async with running(reply_format="pythonic") as (_, _, client):
        refused = await client.post(PATH, json=wish)
        served = await client.post(
            PATH, json=wish | {"messages": [ASKED], "continue_final_message": False}
        )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt", "exclude each other"),
        ({"messages": [ASKED]}, "continue_final_message", "'user'; only the assistant's"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
            "continue_final_message",
            "has tool calls",
        ),
        (
            {"messages": [ASKED, {"role": "assistant", "reasoning_content": "x"}]},
            "continue_final_message",
            "no content to continue",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "prefix": True}, ASKED]},
            "messages",
            "prefix is for the last message",
        ),
        ({"continue_final_message": False, "echo": True}, "echo", "continue_final_message"),
    ],
)
async def test_what_cannot_be_continued_is_refused(changes, param, words):
    async with running() as (engine, _, client):
        answer = await client.post(PATH, json=body(**changes))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]
    assert not engine.submits


async def test_a_text_that_the_template_rewrites_is_refused():
    template = TEMPLATE.replace('message.content or ""', "message.content.split('>')[-1]")
    async with running(template=template) as (engine, _, client):
        refused = await client.post(PATH, json=body("a>b"))
        served = await client.post(PATH, json=body("b"))
    assert refused.status_code == 400
    assert "does not show the last message's content" in refused.json()["error"]["message"]
    assert served.status_code == 200
    assert len(engine.submits) == 1


async def test_the_beginning_of_an_answer_is_left_out():
    async with http_stack() as (stack, client):
        wish = {"model": "fake", "messages": [ASKED], "add_generation_prompt": False}
        assert (await client.post(PATH, json=wish)).status_code == 200
        counted = (await client.post("/tokenize", json=wish)).json()["count"]
        plain = (await client.post("/tokenize", json={"messages": [ASKED]})).json()["count"]
    assert prompt_of(stack.engine) == "<|im_start|>user\n6 * 7?<|im_end|>\n"
    assert counted < plain


@pytest.mark.parametrize("end", [frontend_pb2.PROMPT_END_LAST_MESSAGE, 99])
async def test_messages_are_continued_over_grpc(end):
    request = frontend_pb2.ChatRequest(
        messages=[ASKED, {"role": "assistant", "content": BEGUN}], prompt_end=end
    )
    chat = frontend_pb2.Conversation(messages=request.messages, prompt_end=end)
    async with running(" 42") as (engine, stack, _):
        if end == 99:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [output async for output in stack.stub.Chat(request)]
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "prompt_end is 99" in refused.value.details()
            return
        outputs = [response.output async for response in stack.stub.Chat(request)]
        counted = await stack.stub.Tokenize(frontend_pb2.TokenizeRequest(conversation=chat))
        assert prompt_of(engine) == PROMPT
    assert "".join(output.text for output in outputs) == " 42"
    assert outputs[-1].usage.prompt_tokens == len(counted.token_ids)


async def test_our_client_continues_messages():
    messages = [Message(role="user", content="6 * 7?"), Message(role="assistant", content=BEGUN)]
    async with running(" 42") as (engine, stack, _), OctavoClient(stack.address) as client:
        stream = client.chat(messages, reply=Reply(continues_last_message=True))
        assert (await stream.completion()).text == " 42"
        assert prompt_of(engine) == PROMPT


async def test_the_messages_api_continues_a_last_message_of_the_assistant():
    engine = FakeEngine(script=says(" 42"), files=tokenizer_files(chat_template=TEMPLATE))
    last = {"role": "assistant", "content": BEGUN}
    wish = {"model": "fake", "max_tokens": 9, "messages": [ASKED, last]}
    calling = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    async with http_stack(engine) as (_, client):
        answer = (await client.post("/v1/messages", json=wish)).json()
        calls = {"messages": [ASKED, {"role": "assistant", "content": [calling]}]}
        refused = await client.post("/v1/messages", json=wish | calls)
        assert prompt_of(engine) == PROMPT
    assert [block["text"] for block in answer["content"]] == [" 42"]
    assert refused.status_code == 400
    assert "has calls, so their results must follow" in json.dumps(refused.json())
