"""Chat templates render conversations and can do nothing else."""

import json

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.tokenizer import TokenizerFilesError
from tests.support.byte_tokenizer import tokenizer_files

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: list[dict[str, str]] = HELLO, max_bytes: int = 1000) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, max_bytes=max_bytes)


def template_of(config: dict[str, object], **files: bytes) -> ChatTemplate | None:
    return ChatTemplate.from_files({"tokenizer_config.json": json.dumps(config).encode(), **files})


def test_a_conversation_becomes_a_prompt_that_is_ready_for_the_answer():
    template = ChatTemplate.from_files(tokenizer_files())
    assert template is not None
    assert template.render(HELLO, max_bytes=1000) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_refuses_with_its_own_words():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ messages[0].nothing.more }}", "{{ 'a' + 1 }}", "{{ messages[9].role.x }}"],
)
def test_a_template_that_fails_is_the_requests_error(source):
    with pytest.raises(InvalidRequestError, match="chat template"):
        render(source)


def test_a_template_that_calls_itself_for_ever_is_the_requests_error():
    with pytest.raises(InvalidRequestError, match="chat template"):
        render("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")


def test_a_prompt_that_grows_too_large_is_refused():
    with pytest.raises(InvalidRequestError, match="more than 1000 bytes"):
        render("{% for i in range(99999) %}word {% endfor %}")


def test_broken_jinja_is_refused_when_it_is_read():
    with pytest.raises(TokenizerFilesError, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_templates_find_what_they_expect():
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s>hello"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-31")
    looping = "{% for m in messages %}{% continue %}{% endfor %}{{ add_generation_prompt }}"
    assert render(looping) == "True"
    assert render("{% if true %}\n  {% if true %}x{% endif %}\n{% endif %}\n") == "x"


def test_a_template_comes_from_its_own_file_first():
    template = template_of({"chat_template": "config"}, **{"chat_template.jinja": b"file"})
    assert template is not None
    assert template.render(HELLO, max_bytes=10) == "file"


def test_of_named_templates_the_default_counts():
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    template = template_of({"chat_template": named})
    assert template is not None
    assert template.render(HELLO, max_bytes=10) == "yes"


def test_special_tokens_may_be_written_out_as_objects():
    config = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<end>"}}
    template = template_of(config)
    assert template is not None
    assert template.render(HELLO, max_bytes=10) == "<end>"


def test_a_model_may_have_no_template():
    assert template_of({}) is None
    assert ChatTemplate.from_files({}) is None


def test_an_unreadable_configuration_is_named():
    with pytest.raises(TokenizerFilesError, match="cannot be read"):
        ChatTemplate.from_files({"tokenizer_config.json": b"{"})


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
    with pytest.raises(InvalidRequestError, match="takes no tools"):
        template.render(HELLO, tools=[ADD], max_bytes=1000)
    calls = [{"role": "assistant", "content": None, "tool_calls": [ADD]}]
    with pytest.raises(InvalidRequestError, match="takes no tool calls"):
        template.render(calls, max_bytes=1000)


def test_a_template_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr("services.frontend.text.chat_template.RENDER_TIMEOUT_S", 0.0)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="takes more than"):
        render(source, max_bytes=10**12)


def test_a_template_may_not_count_for_ever():
    with pytest.raises(InvalidRequestError, match="chat template"):
        render("{% for a in range(10 ** 9) %}{% endfor %}")
