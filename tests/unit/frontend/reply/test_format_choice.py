"""Which format a chat template stands for."""

import typing

import pytest

from services.frontend.config import FrontendConfig
from services.frontend.reply.format_choice import FORMATS, format_of_template
from services.frontend.reply.formats.deepseek import CALLS, SEPARATOR
from services.frontend.reply.reply_format import AUTO
from tests.support.family_templates import FAMILIES


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen", "hermes"),
        ("llama", "llama3_json"),
        ("mistral", "mistral"),
        ("gpt-oss", "harmony"),
        ("parts", "plain"),
    ],
)
def test_a_family_has_its_format(family: str, name: str) -> None:
    assert format_of_template(FAMILIES[family][0]) == name


@pytest.mark.parametrize(
    ("excerpt", "name"),
    [
        (f"'{CALLS}' + tool.type + '{SEPARATOR}' + name + '```json'", "deepseek_v3"),
        (f"'{CALLS}' + name + '{SEPARATOR}'", "deepseek_v31"),
        ("'<tool_call>' + name + '<arg_key>' + k + '</arg_key>'", "glm4"),
        ("'<tool_call>\\n<function=' + name + '>\\n<parameter=' + k + '>'", "qwen3_coder"),
        ("'<seed:tool_call><function=' + name + '><parameter=' + k + '>'", "seed_oss"),
        ("toolcall_begin_token = '<minimax:tool_call>'", "minimax_m2"),
        ("ns_token = ']<]minimax[>[' -%}{%- set begin = ns_token ~ '<tool_call>'", "minimax_m3"),
        ("'<|tool_call>call:' + name + '{'", "gemma4"),
        ("<|tool_calls_section_begin|>{{ formatted_id }}", "kimi_k2"),
        ("'<own:tool_call><function=' + name + '><parameter=' + k + '>'", "plain"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral_v11"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ message.content }}", "plain"),
    ],
)
def test_an_excerpt_of_a_template_is_enough(excerpt: str, name: str) -> None:
    assert format_of_template(excerpt) == name


def test_the_flag_has_every_format() -> None:
    choices = typing.get_args(FrontendConfig.model_fields["reply_format"].annotation)
    assert choices == (AUTO, *FORMATS)


def test_every_format_has_a_reader_of_its_own() -> None:
    assert len(set(FORMATS.values())) == len(FORMATS)
