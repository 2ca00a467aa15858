"""Chat templates render conversations and can do nothing else."""

import contextlib

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
