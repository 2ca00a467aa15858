"""Chat templates render conversations and can do nothing else."""

import contextlib
import datetime
import json
import sys

import pytest

from services.frontend.text.chat_template import ChatTemplate, TemplateError
from tests.support.byte_tokenizer import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, str]] = HELLO, max_bytes: int = 1000) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, max_bytes=max_bytes)


def test_a_conversation_becomes_a_prompt_that_is_ready_for_the_answer():
    assert render(CHAT_TEMPLATE) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_refuses_with_its_own_words():
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__}'.format_map({'x': ''}) }}",
        "{{ strftime_now.__globals__.datetime }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ messages.__getattribute__('append') }}",
        "{{ messages.pop() }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages | map(attribute='__class__.__mro__') | list | first }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    shown = ""
    with contextlib.suppress(TemplateError):
        shown = render(source)
    assert shown == ""


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ messages[0].nothing.more }}", "{{ 'a' + 1 }}", "{{ messages[9].role.x }}"],
)
def test_a_template_that_fails_is_the_requests_error(source):
    with pytest.raises(TemplateError, match="chat template"):
        render(source)


def test_a_template_that_calls_itself_for_ever_is_the_requests_error():
    with pytest.raises(TemplateError, match="chat template"):
        render("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")


def test_a_prompt_that_grows_too_large_is_refused():
    with pytest.raises(TemplateError, match="more than 1000 bytes"):
        render("{% for i in range(99999) %}word {% endfor %}")


def test_broken_jinja_is_refused_when_it_is_read():
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_templates_find_what_they_expect():
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hello"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-31")
    looping = "{% for m in messages %}{% continue %}{% endfor %}{{ add_generation_prompt }}"
    assert render(looping) == "True"
    assert render("{% if true %}\n  {% if true %}x{% endif %}\n{% endif %}\n") == "x"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_come_as_json_and_are_none_where_there_are_none():
    source = "{% if tools is none %}none{% else %}{{ tools | tojson }}{% endif %}"
    template = ChatTemplate(source, {})
    assert template.render(HELLO, max_bytes=1000) == "none"
    assert json.loads(template.render(HELLO, tools=[ADD], max_bytes=1000)) == [ADD]


def test_tojson_takes_what_templates_on_hubs_give_it():
    source = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, indent=1) }}"
    assert render(source) == '{\n "a": 1,\n "b": "\\u00e9"\n}'


def test_tools_that_a_template_would_leave_out_are_refused():
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(TemplateError, match="takes no tools"):
        template.render(HELLO, tools=[ADD], max_bytes=1000)
    calls = [{"role": "assistant", "content": None, "tool_calls": [ADD]}]
    with pytest.raises(TemplateError, match="takes no tool calls"):
        template.render(calls, max_bytes=1000)


def test_a_template_may_not_count_for_ever():
    with pytest.raises(TemplateError, match="chat template"):
        render("{% for a in range(10 ** 9) %}{% endfor %}")


def test_the_tag_of_transformers_for_training_renders_what_it_encloses():
    source = (
        "{% set x = 1 %}{%- for m in messages -%}\n{%- generation -%}\n"
        "{% set x = 2 %}{{ m.content }}{{ loop.index }}{{ x }}{% endgeneration %}{{ x }}"
        "{%- endfor %}"
    )
    assert render(source) == "hello121"


def test_what_cannot_be_read_is_named_with_its_line():
    with pytest.raises(TemplateError, match="line 2: Encountered unknown tag 'foo'"):
        ChatTemplate("x\n{% foo %}", {})
    with pytest.raises(TemplateError, match="line 3: No filter named 'foo'"):
        ChatTemplate("x\n\n{{ 1 | foo }}", {})


def test_absent_documents_are_none():
    assert render("{{ documents is none }}") == "True"


def test_templates_see_the_time_that_they_are_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", {})
    now = datetime.datetime(2026, 1, 31, 23, 59)
    template.set_time(now)
    assert template.render(HELLO, max_bytes=100) == "31 Jan 2026 23:59"


@pytest.mark.parametrize("options", ["", "indent=2", "ensure_ascii=True", "sort_keys=True",
                                     "separators=(',', ':')"])  # fmt: skip
def test_json_is_that_of_python_with_marks_and_without(options):
    value = {"b": "é<|x|>\x7f\U0001f600", "a": [1.5, None, True, "\n"]}
    arguments = eval(f"dict({options})")
    expected = json.dumps(value, **{"ensure_ascii": False, **arguments})
    template = ChatTemplate(f"{{{{ tools[0] | tojson({options}) }}}}", {}, special_tokens=["<|x|>"])
    assert template.render(HELLO, tools=[value], max_bytes=1000) == expected
    marked = template.render(HELLO, tools=[value], max_bytes=1000, marks_content=True)
    assert marked[1:].replace(marked[0], "") == expected


def test_errors_show_no_marks_and_prompts_are_measured_without_them():
    template = ChatTemplate(
        "{% if messages[0].content == 'no' %}{{ raise_exception(messages[0].role) }}{% endif %}"
        "{{ messages[0].content }}",
        {},
        special_tokens=["<s>"],
    )
    with pytest.raises(TemplateError, match="refuses: <role>"):
        template.render([{"role": "<role>", "content": "no"}], max_bytes=100, marks_content=True)
    content = "<>" * 50
    said = [{"role": "user", "content": content}]
    assert template.render(said, max_bytes=100, marks_content=True)[1:] != content
    with pytest.raises(TemplateError, match="more than 99 bytes"):
        template.render(said, max_bytes=99, marks_content=True)


def test_a_conversation_that_is_nested_too_deeply_is_refused():
    deep: object = "x"
    for _ in range(sys.getrecursionlimit()):  # libraries of other tests raise it
        deep = [deep]
    template = ChatTemplate("{{ tools | length }}", {}, special_tokens=["<s>"])
    with pytest.raises(TemplateError, match="nested too deeply"):
        template.render(HELLO, tools=[{"parameters": deep}], max_bytes=100, marks_content=True)
