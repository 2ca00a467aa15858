"""Requests that Codex sends in default settings, and their siblings."""

import json

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.http.responses.calls import read_response
from tests.support.codex import AGENTS, IMAGE, PATCH, SEARCH, SECOND_TURN, SHELL, body, said
from tests.support.responses import (
    PATH,
    TOOLS,
    check_events,
    check_response,
    prompt_of,
    read_events,
    running,
    wish,
)

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
REGEX = {"type": "custom", "name": "pick", "format": {
    "type": "grammar", "syntax": "regex", "definition": "a|b",
}}  # fmt: skip
TAKEN = [
    {"client_metadata": {"a": "b"}},
    {"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
    {"include": ["web_search_call.action.sources"]},
    {"reasoning": {"context": "auto"}},
    {"tools": [{**SHELL, "defer_loading": True}]},
    {"tools": [{**SHELL, "allowed_callers": ["direct"], "output_schema": {}}]},
    {"tools": [{**PATCH, "defer_loading": False}]},
    {"tools": [SHELL, SEARCH]},
    {"input": [said("user", "x"), {"type": "reasoning", "encrypted_content": "x"}]},
    {"input": [said("user", "x"), {"type": "web_search_call", "id": "w", "status": "completed"}]},
    {"input": [{**said("user", "x"), "end_turn": True}]},
]


def read(is_strict=False, **changes):
    return read_response(json.dumps(wish(**changes)).encode(), "r", is_strict=is_strict)


def functions(call):
    return {each["function"]["name"]: each["function"] for each in call.prompt.tools}


async def test_its_first_and_second_turns_are_answered():
    async with running() as (engine, stack, client):
        for items in (body()["input"], SECOND_TURN):
            response = await client.post(PATH, json=body(items, stream=True))
            assert check_events(read_events(response.text))["status"] == "completed"
        counts = stack.server.requests.counts.left_out
    prompt = prompt_of(engine)
    assert counts == {"web_search": 2, "image_generation": 2}
    assert "<think>Greet.</think>" in prompt
    assert '<tool_call>multi_agent_v1__spawn_agent{"cmd": "echo hello"}</tool_call>' in prompt
    assert "<|im_start|>tool\nhello<|im_end|>" in prompt
    assert 'apply_patch{"input": "*** Begin\\n+a\\n*** End"}' in prompt
    assert "<|im_start|>tool\nDone.<|im_end|>" in prompt
    assert "gAAA" not in prompt


async def test_a_call_in_a_name_space_gets_its_names_back():
    reply = CALL.format("multi_agent_v1__spawn_agent", '{"cmd": "ls"}')
    async with running(reply) as (_, _, client):
        whole = (await client.post(PATH, json=body())).json()
        stream = await client.post(PATH, json=body(stream=True))
        streamed = check_events(read_events(stream.text))
    for response in (whole, streamed):
        [call] = check_response(response)["output"]
        assert (call["type"], call["namespace"], call["name"]) == (
            "function_call", "multi_agent_v1", "spawn_agent",
        )  # fmt: skip
        assert call["arguments"] == '{"cmd": "ls"}'
    assert [each["type"] for each in whole["tools"]] == ["function", "custom", "namespace"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n+é\\n"}', "*** Begin\n+é\n"),
        ('{"patch": 3}', '{"patch": 3}'),
        ('{"input": 3}', '{"input": 3}'),
    ],
)
async def test_a_call_of_a_custom_tool_has_its_input_as_text(arguments, text):
    async with running(CALL.format("apply_patch", arguments)) as (_, _, client):
        whole = (await client.post(PATH, json=body())).json()
        stream = await client.post(PATH, json=body(stream=True))
        streamed = check_events(read_events(stream.text))
    for response in (whole, streamed):
        [call] = check_response(response)["output"]
        assert (call["type"], call["name"], call["input"]) == (
            "custom_tool_call", "apply_patch", text,
        )  # fmt: skip


async def test_a_stored_call_of_a_custom_tool_goes_on_with_its_result():
    async with running(CALL.format("apply_patch", '{"input": "+a"}')) as (engine, _, client):
        first = (await client.post(PATH, json=body(store=True))).json()
        call_id = first["output"][0]["call_id"]
        result = {"type": "custom_tool_call_output", "call_id": call_id, "output": "Done."}
        more = body([result], previous_response_id=first["id"])
        assert (await client.post(PATH, json=more)).status_code == 200
    assert 'apply_patch{"input": "+a"}' in prompt_of(engine)


def test_the_model_sees_all_tools_as_functions():
    tools = functions(read(tools=[SHELL, PATCH, AGENTS, REGEX]))
    assert list(tools) == [
        "exec_command", "apply_patch", "multi_agent_v1__spawn_agent", "multi_agent_v1__close_agent",
        "pick",
    ]  # fmt: skip
    assert tools["multi_agent_v1__spawn_agent"]["description"] == "Work of others.\n\nStarts one."
    assert tools["multi_agent_v1__close_agent"]["description"] == "Ends one."
    assert tools["apply_patch"]["parameters"]["required"] == ["input"]
    assert PATCH["format"]["definition"] in tools["apply_patch"]["description"]
    assert tools["pick"]["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"


def test_a_name_space_that_ends_like_the_separator_is_not_doubled():
    [name] = functions(read(tools=[{**AGENTS, "name": "mcp__a__", "tools": [SHELL]}]))
    assert name == "mcp__a__exec_command"


def test_two_tools_that_the_model_cannot_tell_apart_are_refused():
    space = {**AGENTS, "name": "a", "tools": [{**SHELL, "name": "b"}]}
    with pytest.raises(InvalidRequestError, match="a__b") as refused:
        read(tools=[{**SHELL, "name": "a__b"}, space])
    assert refused.value.field == "tools"


@pytest.mark.parametrize("demand", [{"type": "custom", "name": "apply_patch"}, "required"])
async def test_a_demanded_custom_tool_with_a_grammar_has_the_whole_reply_as_its_input(demand):
    async with running("*** Begin\n+a\n*** End") as (engine, _, client):
        changes = {"tools": [PATCH], "tool_choice": demand, "reasoning": None}
        whole = (await client.post(PATH, json=body(**changes))).json()
        stream = await client.post(PATH, json=body(**changes, stream=True))
        streamed = check_events(read_events(stream.text))
        assert engine.submits[0].sampling.structured_output.lark == PATCH["format"]["definition"]
    for response in (whole, streamed):
        [call] = check_response(response)["output"]
        assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
        assert call["input"] == "*** Begin\n+a\n*** End"


def test_a_demanded_regex_is_the_form_of_the_reply():
    call = read(tools=[SHELL, REGEX], tool_choice={"type": "custom", "name": "pick"})
    assert call.options.sampling.structured_output.regex == "a|b"


def test_a_demand_that_a_grammar_may_not_meet_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="apply_patch") as refused:
        read(tools=[SHELL, PATCH], tool_choice="required")
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "spawn_agent"},
        {"type": "function", "name": "spawn_agent", "namespace": "multi_agent_v1"},
        {"type": "function", "name": "multi_agent_v1__spawn_agent"},
    ],
)
def test_a_tool_in_a_name_space_can_be_demanded(choice):
    rules = read(tools=[SHELL, AGENTS], tool_choice=choice).prompt.call_rules
    assert (rules.is_required, rules.name) == (True, "multi_agent_v1__spawn_agent")


def test_allowed_tools_leave_hosted_ones_out():
    allowed = [{"type": "function", "name": "exec_command"}, {"type": "image_generation"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    call = read(tools=[SHELL, PATCH, IMAGE], tool_choice=choice)
    assert list(functions(call)) == ["exec_command"]
    assert list(call.left_out) == ["image_generation"]


@pytest.mark.parametrize("kind", ["web_search_2025_08_26", "local_shell", "computer_use_preview"])
def test_a_hosted_tool_beside_a_function_is_left_out(kind):
    call = read(tools=[SHELL, {"type": kind, "anything": [1]}])
    assert list(functions(call)) == ["exec_command"]
    assert len(call.left_out) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [SEARCH]},
        {"tools": [SHELL, SEARCH], "tool_choice": {"type": "web_search"}},
        {"tools": [SEARCH, {"type": "mcp", "server_label": "x"}], "tool_choice": "required"},
        {"tools": [SHELL, {"type": "made_up"}]},
    ],
)
def test_a_hosted_tool_alone_or_demanded_is_refused_by_name(changes):
    with pytest.raises(InvalidRequestError, match=r"'(web_search|made_up)'") as refused:
        read(**changes)
    assert refused.value.field in ("tools", "tool_choice")


async def test_an_empty_list_of_items_is_an_empty_text():
    async with running() as (engine, _, client):
        for text in ([], ""):
            assert (await client.post(PATH, json=wish(input=text))).status_code == 200
    assert prompt_of(engine, 0) == prompt_of(engine, 1)


async def test_a_demanded_call_needs_no_form_of_a_message():
    form = {"format": {"type": "json_schema", "name": "add", "schema": {"type": "object"}}}
    choice = {"type": "function", "name": "add"}
    async with running(CALL.format("add", "{}")) as (engine, _, client):
        wishes = wish(tools=TOOLS, tool_choice=choice, text=form)
        response = (await client.post(PATH, json=wishes)).json()
        assert engine.submits[0].sampling.structured_output.HasField("tagged")
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["text"]["format"]["type"] == "json_schema"


async def test_calls_of_other_tools_in_a_history_are_shown_with_their_results():
    items = [
        said("user", "Look."),
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "/tmp"}]},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
        {"type": "mcp_call", "id": "m1", "name": "read", "server_label": "s", "arguments": "{}",
         "output": "text"},
        {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "q"}},
        {"type": "image_generation_call", "id": "i1", "result": "AAAA"},
        {"type": "mcp_list_tools", "id": "l1", "server_label": "s", "tools": []},
        said("user", "And?"),
    ]  # fmt: skip
    async with running() as (engine, _, client):
        response = await client.post(PATH, json=wish(input=items, tools=TOOLS))
        assert response.status_code == 200, response.text
    prompt = prompt_of(engine)
    assert 'local_shell{"type": "exec", "command": ["ls"], "env": {}}' in prompt
    for result in ("a.txt", '[{"stdout": "/tmp"}]', "completed", "text"):
        assert f"<|im_start|>tool\n{result}<|im_end|>" in prompt
    for left_out in ("AAAA", "query", "server_label"):
        assert left_out not in prompt


@pytest.mark.parametrize("entry", ["compaction", "item_reference", "configuration_update"])
def test_items_that_hold_what_cannot_be_read_are_refused_by_name(entry):
    with pytest.raises(InvalidRequestError, match=entry):
        read(input=[said("user", "x"), {"type": entry, "id": "x"}])


@pytest.mark.parametrize("changes", TAKEN)
def test_strict_fields_refuse_what_is_taken_without_effect(changes):
    read(**changes)
    with pytest.raises(InvalidRequestError) as refused:
        read(is_strict=True, **changes)
    assert refused.value.field == next(iter(changes))
