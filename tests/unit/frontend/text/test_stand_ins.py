"""Conversations for chat templates that lack tools, system messages or variables."""

import json

import pytest

from services.frontend.text.chat_template import ChatTemplate, TemplateError

PLAIN = (
    "{%- for m in messages %}{{- '[' + m.role + ']' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"
)
ALTERNATING = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}" + PLAIN
)
"""Takes no system message anywhere, and no tools."""
FIRST_ONLY = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('system comes first') }}{%- endif %}{%- endfor %}" + PLAIN
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
USED = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "tool", "tool_call_id": "c2", "content": "3"},
    {"role": "user", "content": "And?"},
]


def render(source, messages, *, tools=(), is_strict=False, writes_tools=True, **options):
    template = ChatTemplate(source, {}, is_strict=is_strict, writes_tools=writes_tools)
    return template.render(messages, tools=tools, max_bytes=10_000, **options)


def said(*roles):
    return [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]


@pytest.mark.parametrize("source", [PLAIN, FIRST_ONLY])
def test_tools_end_the_system_message_of_a_template_without_tools(source):
    prompt = render(source, [{"role": "system", "content": "Be brief."}, *USED[:1]], tools=[TOOL])
    system, _, rest = prompt.partition("[user]")
    assert system.startswith("[system]Be brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert rest == "1?[assistant]"


def test_tools_begin_a_system_message_where_there_is_none():
    assert render(PLAIN, USED[:1], tools=[TOOL]).startswith("[system]# Tools\n")


def test_a_template_that_takes_turns_alone_has_the_tools_in_the_first_turn():
    prompt = render(ALTERNATING, USED, tools=[TOOL])
    assert prompt.startswith("[user]# Tools\n")
    assert prompt.count("[user]") == 2


def test_calls_and_results_are_text_in_the_same_form():
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert render(PLAIN, USED) == (
        f"[user]1?[assistant]I add.\n{call}\n{call}"
        "[user]<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nAnd?"
        "[assistant]"
    )


def test_a_template_with_tools_gets_them_as_they_are():
    source = PLAIN + "{{ tools | tojson }}{{ messages[1].tool_calls | length }}"
    prompt = render(source.replace("m.content", "(m.content or '')"), USED, tools=[TOOL])
    assert "# Tools" not in prompt
    assert "<tool_call>" not in prompt
    assert json.dumps([TOOL]) in prompt


def test_a_format_that_reads_no_such_calls_has_no_written_tools():
    with pytest.raises(TemplateError, match="takes no tools"):
        render(PLAIN, USED[:1], tools=[TOOL], writes_tools=False)


@pytest.mark.parametrize(
    ("source", "roles", "shown"),
    [
        (PLAIN, ("system", "user", "system", "user"), None),
        (FIRST_ONLY, ("system", "user"), None),
        (FIRST_ONLY, ("system", "system", "user"), "[system]system 0\n\nsystem 1[user]user 2"),
        (FIRST_ONLY, ("system", "user", "system"), "[system]system 0[user]user 1\nsystem 2"),
        (
            FIRST_ONLY,
            ("user", "assistant", "system", "user"),
            "[user]user 0[assistant]assistant 1[user]system 2\nuser 3",
        ),
        (ALTERNATING, ("system", "user"), "[user]system 0\nuser 1"),
        (ALTERNATING, ("user", "system"), "[user]user 0\nsystem 1"),
    ],
)
def test_a_system_message_that_a_template_does_not_show_is_the_users(source, roles, shown):
    messages = said(*roles)
    as_given = "".join(f"[{each['role']}]{each['content']}" for each in messages)
    assert render(source, messages) == (as_given if shown is None else shown) + "[assistant]"


def test_the_users_own_messages_stay_apart():
    with pytest.raises(TemplateError, match="alternate"):
        render(ALTERNATING, said("user", "user"))


@pytest.mark.parametrize(
    "variables",
    [{"reasoning_effort": "high"}, {"enable_thinking": True}, {"thinking": False}],
)
def test_a_wish_about_reasoning_without_a_variable_changes_nothing(variables):
    assert render(PLAIN, USED[:1], variables=variables) == "[user]1?[assistant]"
    with pytest.raises(TemplateError, match="takes no variable"):
        render(PLAIN, USED[:1], variables=variables, is_strict=True)
    with pytest.raises(TemplateError, match="'colour'"):
        render(PLAIN, USED[:1], variables={**variables, "colour": 1})


@pytest.mark.parametrize(
    ("reasons", "variables", "mode"),
    [(False, {}, "disabled"), (True, {}, ""), (None, {}, ""), (None, {"thinking_mode": "x"}, "x")],
)
def test_a_wish_for_no_reasoning_disables_a_template_with_modes(reasons, variables, mode):
    source = PLAIN + "{{ thinking_mode }}"
    shown = render(source, USED[:1], variables=variables, reasons=reasons)
    assert shown == f"[user]1?[assistant]{mode}"


def test_earlier_reasoning_is_left_out_where_a_template_has_none():
    messages = [*USED[:1], {"role": "assistant", "content": "2", "reasoning_content": "Sums."}]
    assert render(PLAIN, messages) == "[user]1?[assistant]2[assistant]"
    with pytest.raises(TemplateError, match="reasoning_content"):
        render(PLAIN, messages, is_strict=True)
