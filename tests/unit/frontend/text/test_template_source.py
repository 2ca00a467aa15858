"""Where a model's chat template is found."""

import json

import pytest

from services.frontend.text.chat_template import TemplateError
from services.frontend.text.template_source import TemplateSource, find_template
from services.frontend.text.template_worker import ChatTemplates
from services.frontend.text.tokenizer import TokenizerFilesError


def found(config: object, **files: bytes) -> TemplateSource | None:
    return find_template({"tokenizer_config.json": json.dumps(config).encode(), **files})


def test_a_template_comes_from_its_own_file_first():
    assert found({"chat_template": "config"}, **{"chat_template.jinja": b"file"}).text == "file"
    assert found({"chat_template": "config"}).text == "config"


def test_of_named_templates_the_default_counts():
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert found({"chat_template": named}).text == "yes"


def test_special_tokens_may_be_written_out_as_objects():
    config = {"chat_template": "x", "eos_token": {"content": "<end>"}, "bos_token": "<s>"}
    assert found(config).variables == {"eos_token": "<end>", "bos_token": "<s>"}


def test_a_model_may_have_no_template():
    assert found({}) is None
    assert find_template({}) is None


@pytest.mark.parametrize(
    "config", [b"{", b"[]", b'{"chat_template": ["x"]}', b"[" * 100_000, b"\xff"]
)
def test_an_unreadable_configuration_is_named(config):
    with pytest.raises(TokenizerFilesError, match="cannot be read"):
        find_template({"tokenizer_config.json": config})


def test_a_template_that_is_no_text_is_named():
    with pytest.raises(TokenizerFilesError, match="no text"):
        found({"chat_template": 7})


def test_conversations_with_tools_have_a_template_of_their_own():
    named = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    for config in (named, [{"name": k, "template": v} for k, v in named.items()]):
        source = found({"chat_template": config})
        assert (source.text, source.tool_text) == ("plain", "tools")
    files = {"additional_chat_templates/tool_use.jinja": b"file"}
    source = found({"chat_template": named}, **{"chat_template.jinja": b"own"}, **files)
    assert (source.text, source.tool_text) == ("own", "file")
    assert found({"chat_template": {"rag": "x"}}) is None


def test_a_model_with_a_template_for_tools_only_refuses_other_conversations():
    source = found({"chat_template": {"tool_use": "{{ tools | length }}"}})
    templates = ChatTemplates(source.opening())
    ask = {
        "messages": [{"role": "user", "content": "x"}],
        "max_bytes": 9,
        "marks_content": False,
        "variables": {},
        "reasons": None,
        "end": "answer",
    }
    now = {"now": "2026-01-31T00:00:00"}
    assert templates.render({**ask, **now, "tools": [{}]}) == "1"
    with pytest.raises(TemplateError, match="for tools only"):
        templates.render({**ask, **now, "tools": []})


def test_a_broken_template_for_tools_costs_conversations_with_tools_alone():
    source = found({"chat_template": {"default": "fine", "tool_use": "{% if %}"}})
    templates = ChatTemplates(source.opening())
    ask = {
        "messages": [{"role": "user", "content": "x"}],
        "max_bytes": 9,
        "marks_content": False,
        "variables": {},
        "reasons": None,
        "end": "answer",
    }
    now = {"now": "2026-01-31T00:00:00"}
    assert templates.render({**ask, **now, "tools": []}) == "fine"
    with pytest.raises(TemplateError, match=r"template for tools: .* line 1"):
        templates.render({**ask, **now, "tools": [{}]})
