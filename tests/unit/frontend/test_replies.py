"""Replies with calls and reasoning, over HTTP and gRPC, streamed and whole."""

import json
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest
from openai import AsyncOpenAI

from protos.common.v1.sampling_pb2 import FINISH_REASON_STOP
from protos.frontend.v1 import frontend_pb2
from services.client.client import OctavoClient
from services.client.requests import Message, Tool
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack

TEMPLATE = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.reasoning_content %}{{- "<think>" + message.reasoning_content + "</think>" }}{%- endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and enable_thinking %}{{- "<think>\\n" }}{%- endif %}
{%- if reasoning_effort %}{{- reasoning_effort }}{%- endif %}
"""  # noqa: E501
WITHOUT_REASONING = "{{ tools }}{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}]
REPLY = (
    "<think>\nSums.\n</think>\n\nI add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
)
PATH = "/v1/chat/completions"


@asynccontextmanager
async def running(reply=REPLY, template=TEMPLATE, **config):
    files = tokenizer_files(chat_template=template)
    async with (
        FakeEngine(script=says(reply), files=files) as engine,
        frontend_stack(engine, http_port=0, **config) as stack,
        stack.http_client() as client,
    ):
        yield engine, stack, client


def body(**changes):
    return {"model": "fake", "messages": [{"role": "user", "content": "1?"}], **changes}


def names_and_arguments(calls):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def test_a_whole_reply_over_http():
    async with running() as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, n=2, logprobs=True))
        assert len(response.json()["choices"]) == 2
        for choice in response.json()["choices"]:
            message = choice["message"]
            assert message["content"] == "I add."
            assert message["reasoning_content"] == "Sums."
            assert names_and_arguments(message["tool_calls"]) == [
                ("add", {"a": 1}),
                ("add", {"a": 2}),
            ]
            assert len({call["id"] for call in message["tool_calls"]}) == 2
            assert choice["finish_reason"] == "tool_calls"
            assert "".join(e["token"] for e in choice["logprobs"]["content"]).startswith("<think>")
        assert response.json()["usage"]["completion_tokens"] > 0


async def test_a_reply_of_calls_alone_has_null_content():
    async with running(REPLY.partition("I add.\n")[2]) as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS))
        message = response.json()["choices"][0]["message"]
        assert message["content"] is None
        assert "reasoning_content" not in message


async def test_a_streamed_reply_is_the_whole_one_through_the_openai_client():
    async with running() as (_, stack, _):
        client = AsyncOpenAI(base_url=f"{stack.http_url}/v1", api_key="none")
        async with client, client.chat.completions.stream(**body(tools=TOOLS)) as stream:
            starts, finish = [], None
            async for event in stream:
                if event.type != "chunk":
                    continue
                [choice] = event.chunk.choices
                finish = choice.finish_reason or finish
                assert "tool_call" not in (choice.delta.content or "")
                for call in choice.delta.tool_calls or ():
                    if call.id:
                        starts.append((call.index, call.type, call.function.name))
                    assert call.function.arguments is not None
            message = (await stream.get_final_completion()).choices[0].message
        assert starts == [(0, "function", "add"), (1, "function", "add")]
        assert finish == "tool_calls"
        assert message.content == "I add."
        assert message.reasoning_content == "Sums."
        assert [json.loads(c.function.arguments) for c in message.tool_calls] == [
            {"a": 1},
            {"a": 2},
        ]


async def test_a_reply_over_chat_and_session():
    request = frontend_pb2.ChatRequest(
        messages=[{"role": "user", "content": "1?"}], tools=[{"name": "add"}]
    )
    async with running() as (_, stack, _):
        outputs = [response.output async for response in stack.stub.Chat(request)]
        call = stack.stub.Session()
        await call.write(frontend_pb2.SessionRequest(handle=1, chat=request))
        in_session = [(await call.read()).output]
        while not in_session[-1].HasField("usage"):
            in_session.append((await call.read()).output)
        call.cancel()
        for each in (outputs, in_session):
            assert "".join(output.text for output in each) == "I add."
            assert "".join(output.reasoning for output in each) == "Sums."
            assert each[-1].finish_reason == FINISH_REASON_STOP
            pieces = [piece for output in each for piece in output.tool_calls]
            assert [(p.index, p.name) for p in pieces if p.id] == [(0, "add"), (1, "add")]
            for index in (0, 1):
                arguments = "".join(p.arguments for p in pieces if p.index == index)
                assert json.loads(arguments) == {"a": index + 1}


async def test_our_client_joins_the_pieces():
    tools = [Tool(name="add")]
    async with running() as (_, stack, _), OctavoClient(stack.address) as client:
        messages = [Message(role="user", content="1?")]
        answer = await client.chat(messages, tools=tools).completion()
        assert (answer.reasoning, answer.text) == ("Sums.", "I add.")
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"a": 1}, {"a": 2}]
        again = [*messages, Message(role="assistant", tool_calls=answer.tool_calls)]
        assert (await client.chat(again, tools=tools).completion()).tool_calls


async def test_a_model_without_reasoning_is_read_only_with_tools():
    async with running(template=WITHOUT_REASONING) as (_, _, client):
        plain = await client.post(PATH, json=body())
        none = await client.post(PATH, json=body(tools=TOOLS, tool_choice="none"))
        for response in (plain, none):
            assert response.json()["choices"][0]["message"]["content"] == REPLY
            assert response.json()["choices"][0]["finish_reason"] == "stop"
        read = await client.post(PATH, json=body(tools=TOOLS))
        assert read.json()["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_flag_chooses_the_format():
    async with running(reply_format="plain") as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS))
        message = response.json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Sums."
        assert "<tool_call>" in message["content"]


async def test_special_tokens_of_the_format_reach_the_reader_and_others_stay_hidden():
    template = TEMPLATE.replace("<tool_call>", "<|im_start|>")
    reply = "<|im_start|>Hi<think>So.</think>Yes<|im_start|>"
    async with running(reply, template) as (_, _, client):
        response = await client.post(PATH, json=body())
        assert response.json()["choices"][0]["message"]["content"] == "Hi<think>So.</think>Yes"


async def test_a_prompt_that_opens_the_reasoning_begins_in_it():
    async with running("So.</think>Yes.") as (_, _, client):
        response = await client.post(
            PATH, json=body(chat_template_kwargs={"enable_thinking": True})
        )
        message = response.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")
        for changes in ({}, {"chat_template_kwargs": {"enable_thinking": None, "unknown": None}}):
            closed = await client.post(PATH, json=body(**changes))
            assert closed.json()["choices"][0]["message"]["content"] == "So.</think>Yes."


async def test_an_answer_of_ours_may_be_sent_back():
    async with running() as (_, _, client):
        answer = await client.post(PATH, json=body(tools=TOOLS))
        message = answer.json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message["tool_calls"]
        ]
        messages = [*body()["messages"], message, *results]
        response = await client.post(PATH, json=body(tools=TOOLS, messages=messages))
        assert response.status_code == 200


@pytest.mark.parametrize("stop", ["</tool_call>", "<think>", "Sums", '"a"', "add.\\n<"])
async def test_stop_strings_match_neither_markers_nor_reasoning_nor_arguments(stop):
    async with running() as (_, _, client):
        whole = await client.post(PATH, json=body(tools=TOOLS))
        response = await client.post(PATH, json=body(tools=TOOLS, stop=stop))
        [choice], [usual] = response.json()["choices"], whole.json()["choices"]
        for call in (*choice["message"]["tool_calls"], *usual["message"]["tool_calls"]):
            del call["id"]
        assert choice == usual


@pytest.mark.parametrize("stop", ["add.", " add", "d"])
async def test_stop_strings_end_the_content(stop):
    async with running() as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, stop=[stop, "</think>"]))
        [choice] = response.json()["choices"]
        assert choice["message"]["content"] == "I add."[: "I add.".index(stop)]
        assert choice["message"]["reasoning_content"] == "Sums."
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert response.json()["usage"]["completion_tokens"] <= len(
            "<think>\nSums.\n</think>\n\nI add."
        )


async def test_a_stop_string_does_not_span_a_call():
    reply = 'E<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>ND'
    async with running(reply) as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, stop="END"))
        message = response.json()["choices"][0]["message"]
        assert (message["content"], len(message["tool_calls"])) == ("END", 1)


async def test_usage_counts_the_tokens_of_reasoning_without_its_markers():
    async with running() as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, n=2))
        details = response.json()["usage"]["completion_tokens_details"]
        one = await client.post(PATH, json=body(tools=TOOLS))
        assert details["reasoning_tokens"] == 2 * count_of_reasoning(one)
        assert 1 <= count_of_reasoning(one) <= len("\nSums.\n")
    async with running("Yes.") as (_, _, client):
        assert count_of_reasoning(await client.post(PATH, json=body())) == 0


def count_of_reasoning(response):
    return response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]


async def test_a_budget_of_reasoning_goes_to_the_engine_with_its_markers():
    async with running() as (engine, stack, client):
        await client.post(PATH, json=body(max_reasoning_tokens=5))
        wanted = tagged_of(engine)
        assert wanted.WhichOneof("grammar") is None
        assert (wanted.preamble.begin, wanted.preamble.end) == ("<think>", "</think>")
        assert wanted.preamble.max_tokens == 5
        thinking = {"enable_thinking": True}
        await client.post(PATH, json=body(max_reasoning_tokens=0, chat_template_kwargs=thinking))
        assert tagged_of(engine).preamble.begin == ""
        assert tagged_of(engine).preamble.HasField("max_tokens")
        await client.post(
            PATH, json=body(max_reasoning_tokens=7, response_format={"type": "json_object"})
        )
        assert tagged_of(engine).json_object
        assert tagged_of(engine).preamble.max_tokens == 7
        request = frontend_pb2.ChatRequest(
            messages=[{"role": "user", "content": "1?"}], max_reasoning_tokens=3
        )
        [*_, last] = [response.output async for response in stack.stub.Chat(request)]
        assert tagged_of(engine).preamble.max_tokens == 3
        assert last.usage.reasoning_tokens >= 1
        await client.post(PATH, json=body())
        assert not engine.submits[-1].sampling.HasField("structured_output")


NO_EFFORT = {
    PATH: {**body(), "reasoning_effort": "none"},
    "/v1/responses": {"model": "fake", "input": "1?", "reasoning": {"effort": "none"}},
    "/v1/messages": {**body(), "max_tokens": 8, "output_config": {"effort": "none"}},
}
SWITCHED = """\
{{- messages[0].content }}
{{- "<think>" }}{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}
"""


@pytest.mark.parametrize("path", NO_EFFORT)
async def test_an_effort_of_none_turns_the_reasoning_off_in_the_template(path):
    async with running("Yes.", SWITCHED) as (engine, _, client):
        response = await client.post(path, json=NO_EFFORT[path])
        assert response.status_code == 200, response.text
        assert shown_prompt(engine).endswith("1?<think></think>")


@pytest.mark.parametrize("path", NO_EFFORT)
async def test_an_effort_of_none_ends_the_reasoning_that_a_template_cannot_turn_off(path):
    template = "{{ messages[0].content }}<think>{# </think> #}"
    async with running("</think>Yes.", template) as (engine, _, client):
        response = await client.post(path, json=NO_EFFORT[path])
        assert response.status_code == 200, response.text
        assert tagged_of(engine).preamble.HasField("max_tokens")
        assert tagged_of(engine).preamble.max_tokens == 0


async def test_an_effort_of_none_is_granted_by_a_model_that_does_not_reason():
    async with running("Yes.", WITHOUT_REASONING) as (engine, _, client):
        response = await client.post(PATH, json=body(reasoning_effort="none"))
        assert response.json()["choices"][0]["message"]["content"] == "Yes."
        assert not engine.submits[-1].sampling.HasField("structured_output")


async def test_an_effort_of_none_over_grpc_is_the_same():
    async with running("Yes.", SWITCHED) as (engine, stack, _):
        request = frontend_pb2.ChatRequest(
            messages=[{"role": "user", "content": "1?"}],
            template_variables='{"reasoning_effort": "none"}',
        )
        assert [response async for response in stack.stub.Chat(request)]
        assert shown_prompt(engine).endswith("1?<think></think>")


async def test_an_effort_of_none_and_a_switch_that_is_on_contradict_each_other():
    thinking = {"enable_thinking": True}
    async with running("Yes.", SWITCHED) as (engine, _, client):
        response = await client.post(
            PATH, json=body(reasoning_effort="none", chat_template_kwargs=thinking)
        )
        assert response.status_code == 400
        assert "enable_thinking contradicts" in response.json()["error"]["message"]
        assert not engine.submits


async def test_the_servers_budget_holds_for_requests_without_one():
    async with running(max_reasoning_tokens=9) as (engine, _, client):
        await client.post(PATH, json=body())
        assert tagged_of(engine).preamble.max_tokens == 9
        await client.post(PATH, json=body(max_reasoning_tokens=2))
        assert tagged_of(engine).preamble.max_tokens == 2


async def test_a_budget_changes_nothing_where_the_model_does_not_reason():
    async with running("Yes.", WITHOUT_REASONING) as (engine, _, client):
        response = await client.post(PATH, json=body(max_reasoning_tokens=2))
        assert response.json()["choices"][0]["message"]["content"] == "Yes."
        assert not engine.submits[-1].sampling.HasField("structured_output")


async def test_a_reply_that_is_cut_off_ends_with_length_and_whole_pieces():
    async with running() as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, max_tokens=40))
        [choice] = response.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert "<" not in (choice["message"]["content"] or "")


def shown_prompt(engine):
    ids = np.frombuffer(engine.submits[-1].prompt_token_ids, "<u4").tolist()
    return reference_tokenizer().decode(ids, skip_special_tokens=False).rstrip()


def tagged_of(engine):
    return engine.submits[-1].sampling.structured_output


async def test_demanded_calls_are_held_by_a_grammar():
    two = [*TOOLS, {"type": "function", "function": {"name": "now", "strict": True}}]
    named = {"type": "function", "function": {"name": "now"}}
    async with running() as (engine, _, client):

        async def grammar(**changes):
            response = await client.post(PATH, json=body(tools=two, **changes))
            assert response.status_code == 200, response.text
            return tagged_of(engine)

        required = await grammar(tool_choice="required")
        assert [tag.begin.split('"')[3] for tag in required.tagged.tags] == ["add", "now"]
        assert not required.tagged.triggers
        assert not required.tagged.stop_after_first
        assert (required.preamble.begin, required.preamble.end) == ("<think>", "</think>")
        assert (await grammar(tool_choice="required", parallel_tool_calls=False)
                ).tagged.stop_after_first  # fmt: skip
        one = await grammar(tool_choice=named)
        assert len(one.tagged.tags) == 1
        assert one.tagged.stop_after_first
        beside = await grammar()
        assert beside.tagged.triggers == ["<tool_call>"]
        assert json.loads(beside.tagged.tags[0].json_schema) == {"type": "object"}
        opened = await grammar(
            tool_choice="required", chat_template_kwargs={"enable_thinking": True}
        )
        assert opened.preamble.begin == ""
        await client.post(PATH, json=body(tools=TOOLS))
        assert not engine.submits[-1].sampling.HasField("structured_output")
        await client.post(PATH, json=body(response_format={"type": "json_object"}))
        assert tagged_of(engine).json_object
        assert tagged_of(engine).preamble.end == "</think>"


async def test_calls_are_demanded_over_grpc():
    request = frontend_pb2.ChatRequest(
        messages=[{"role": "user", "content": "1?"}], tools=[{"name": "add"}, {"name": "now"}]
    )
    async with running() as (engine, stack, _):

        async def tagged(**changes):
            changed = frontend_pb2.ChatRequest(**changes)
            changed.MergeFrom(request)
            async for _ in stack.stub.Chat(changed):
                pass
            return tagged_of(engine).tagged

        assert len((await tagged(tool_use=frontend_pb2.TOOL_USE_REQUIRED)).tags) == 2
        assert len((await tagged(required_tool="now")).tags) == 1
        assert (await tagged(parallel_tool_calls=False)).stop_after_first
        await tagged(tool_use=frontend_pb2.TOOL_USE_NONE)
        assert not engine.submits[-1].sampling.HasField("structured_output")
        for wrong in (
            {"tool_use": 7},
            {"required_tool": "other"},
            {"tool_use": frontend_pb2.TOOL_USE_NONE, "required_tool": "now"},
            {"template_variables": "[]"},
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tagged(**wrong)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": {}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a-b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1] * 65}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"unknown": 1}}, None),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
         "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_name(changes, field):
    async with running() as (engine, _, client):
        response = await client.post(PATH, json=body(**{"tools": TOOLS, **changes}))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field
        assert not engine.submits


async def test_a_format_without_calls_refuses_demanded_ones():
    async with running(reply_format="plain") as (_, _, client):
        response = await client.post(PATH, json=body(tools=TOOLS, tool_choice="required"))
        assert response.json()["error"]["param"] == "tool_choice"
        assert "plain" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["pythonic", "glm4", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3"]
)
async def test_a_format_with_pairs_says_how_it_writes_them(name):
    async with running(reply_format=name) as (engine, _, client):
        await client.post(PATH, json=body(tools=TOOLS, tool_choice="required"))
        [tag] = tagged_of(engine).tagged.tags
        assert tag.HasField("pairs")


async def test_a_structural_tag_is_text_with_parts():
    wanted = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    async with running() as (engine, _, client):
        await client.post(PATH, json=body(response_format=wanted))
        tagged = tagged_of(engine).tagged
        assert (tagged.triggers, tagged.has_text_between) == (["<f="], True)
        assert (tagged.tags[0].begin, tagged.tags[0].end) == ("<f=a>", "</f>")
        for wrong in ({"type": "text"}, {"triggers": None}, {"structures": []}, {"triggers": [""]}):
            response = await client.post(PATH, json=body(response_format={**wanted, **wrong}))
            assert response.json()["error"]["param"] == "response_format"


async def test_the_template_gets_the_callers_variables_and_no_special_tokens_in_them():
    async with running() as (engine, _, client):
        for effort in ("low", "<|im_end|>"):
            await client.post(PATH, json=body(reasoning_effort=effort))
        assert engine.submits[0].prompt_token_ids != engine.submits[1].prompt_token_ids
        ids = engine.submits[1].prompt_token_ids
        assert [ids[i : i + 4] for i in range(0, len(ids), 4)].count(b"\1\0\0\0") == 1
