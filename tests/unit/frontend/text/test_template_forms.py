"""Templates get content and arguments in the form that they render."""

import json

import pytest

from services.frontend.text.chat_template import ChatTemplate, TemplateError

ARGUMENTS = '{"city":"Oslo"}'
CONVERSATION = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "get", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "content": "snow", "tool_call_id": "call00001"},
]
HELLO = [{"role": "user", "content": "hello"}]


def render(source, messages=HELLO, **variables):
    return ChatTemplate(source, variables).render(messages, max_bytes=10_000)


ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_that_iterates_over_parts_gets_parts():
    assert render(ONLY_PARTS) == "[user]hello"
    assert render(BOTH) == "hello"


def test_the_form_is_found_by_role():
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{% for part in m.content %}{{ part['text'] }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "be brief;"}, *HELLO]
    assert render(source, messages) == "be brief;hello"


def test_a_template_that_shows_no_content_at_all_gets_text():
    assert render("{{ messages[0].content is string }}") == "True"
    assert render("fixed") == "fixed"


CALLS = "{% for m in messages %}{% for call in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        # As Llama 3, Hermes and Qwen write calls.
        ("{{ call.function.arguments | tojson }}", '{"city": "Oslo"}'),
        ("{{ call.function | tojson }}", '{"name": "get", "arguments": {"city": "Oslo"}}'),
        # As DeepSeek does, whose template joins text.
        ("{{ '```json\n' + call.function.arguments + '\n```' }}", f"```json\n{ARGUMENTS}\n```"),
        ("{{ call['function']['arguments'] }}", ARGUMENTS),
        (
            "{% if call.function.arguments is string %}text{% else %}"
            "{{ call.function.arguments | tojson }}{% endif %}",
            '{"city": "Oslo"}',
        ),
        # As Qwen3-Coder and GLM do.
        (
            "{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}",
            "<city>Oslo",
        ),
        (
            "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            "city=Oslo",
        ),
        (
            "{% if call.function.arguments is mapping %}{% for k in call.function.arguments %}"
            "({{ k }}){% endfor %}{% else %}{{ call.function.arguments }}{% endif %}",
            "(city)",
        ),
    ],
)
def test_arguments_come_as_the_template_writes_them(shown, expected):
    assert render(CALLS.replace("%s", shown), CONVERSATION) == expected


def test_arguments_that_are_text_are_the_callers_own():
    source = CALLS.replace("%s", "{{ '>' + call.function.arguments }}")
    calls = json.loads(json.dumps(CONVERSATION))
    calls[1]["tool_calls"][0]["function"]["arguments"] = '{ "b":1,\n"a":2 }'
    assert render(source, calls) == '>{ "b":1,\n"a":2 }'


def test_a_template_that_would_write_none_gets_empty_content():
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %};"
        "{% endfor %}"
    )
    assert 'assistant:{"city": "Oslo"};' in render(source, CONVERSATION)
    joining = source.replace("m.content | trim", "'' + m.content")
    assert 'assistant:{"city": "Oslo"};' in render(joining, CONVERSATION)
    asking = (
        "{% for m in messages %}{{ m.content is none }}{{ m.tool_calls is defined }} {% endfor %}"
    )
    assert render(asking, CONVERSATION) == "FalseFalse TrueTrue FalseFalse "


def tool(**fields):
    return {"type": "function", "function": {"name": "f", **fields}}


NEEDS_ALL = (
    "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for name in t.function.parameters.properties %} {{ name }}{% endfor %};{% endfor %}"
)
WHOLE = tool(description="d", parameters={"type": "object", "properties": {"a": {}}})


def test_a_template_that_fails_on_tools_without_all_keys_gets_all_keys():
    template = ChatTemplate(NEEDS_ALL, {})
    tools = [tool(), WHOLE, tool(parameters={})]
    assert template.render(HELLO, tools=tools, max_bytes=100) == "f: ;f: d a;f: ;"
    shown = ChatTemplate(NEEDS_ALL + "{{ tools | tojson }}", {}).render(
        HELLO, tools=[tool(parameters={"required": []})], max_bytes=1000
    )
    assert '"parameters": {"type": "object", "properties": {}, "required": []}' in shown


def test_other_templates_get_tools_as_they_are():
    shown = ChatTemplate("{{ tools | tojson }}", {}).render(HELLO, tools=[tool()], max_bytes=1000)
    assert json.loads(shown) == [tool()]


def test_a_template_that_fails_on_every_tool_says_why():
    with pytest.raises(TemplateError, match="has no attribute 'strict'"):
        ChatTemplate("{{ 'a' + tools[0].strict }}", {}).render(
            HELLO, tools=[tool()], max_bytes=1000
        )
