"""A message is continued where transformers would continue it, with every template of the tests."""

import copy
import functools
import itertools
import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.frontend.text.chat_template import ChatTemplate, TemplateError
from services.frontend.text.content_marks import MarkedText
from services.frontend.text.prompt_end import PromptEnd
from tests.support.byte_tokenizer import CHAT_TEMPLATE, TOOL_TEMPLATE
from tests.support.family_templates import FAMILIES
from tests.unit.frontend import test_replies
from tests.unit.frontend.http.messages import test_messages
from tests.unit.frontend.text.test_families import (
    CONVERSATIONS,
    as_transformers_wants,
    encoded,
    ours,
    reference_of,
)

TINY = Path("models/checkpoints/tiny/tokenizer_config.json")
TEMPLATES = {name: template for name, (template, _, _) in FAMILIES.items()} | {
    "bytes": CHAT_TEMPLATE,
    "tools": TOOL_TEMPLATE,
    "replies": test_replies.TEMPLATE,
    "messages": test_messages.TEMPLATE,
    "tiny": json.loads(TINY.read_text())["chat_template"],
}
TEXTS = [
    "The answer is",
    "The answer is ",
    "  It is\u00a0\n\n",
    "1 < 2 > [x] <",
    "< |\n",
    "",
    " \n",
    "<think>\nLet me",
    "<think>\nhmm\n</think>\n\nYes",
    "a</think>b ",
    "What? 1 <",
]
BOUNDS = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL = ["<s>", "</s>", "[INST]", "<|im_end|>", "<|x|>"]


@functools.cache
def template_of(name):
    return ChatTemplate(TEMPLATES[name], BOUNDS, special_tokens=SPECIAL)


def rendered(name, messages, tools):
    """The text of transformers and ours, without and with marks; None for a refusal."""
    template = TEMPLATES[name]
    wanted = as_transformers_wants(name, copy.deepcopy(messages))
    try:
        [expected], _ = render_jinja_template(
            [wanted], tools or None, chat_template=template, continue_final_message=True, **BOUNDS
        )
    except ValueError:
        expected = None
    texts = [expected]
    for marks in (False, True):
        told = json.loads(json.dumps(messages))
        for call in itertools.chain(*(message.get("tool_calls", ()) for message in told)):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        try:
            text = template_of(name).render(
                told, tools=tools, end=PromptEnd.LAST_MESSAGE, max_bytes=10**5, marks_content=marks
            )
        except TemplateError as error:
            assert "cannot be continued" in str(error)  # noqa: PT017  other ones are not equal
            texts.append(None)
            continue
        if marks:
            prompt = MarkedText.read(text)
            text = prompt.text.replace(prompt.mark, "")
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_prompt_is_that_of_transformers(name, text):
    final = {"role": "assistant", "content": text}
    for messages, tools in CONVERSATIONS.values():
        if (tools and "tools" not in TEMPLATES[name]) or (
            name == "bytes" and any(each["role"] == "tool" for each in messages)
        ):
            continue
        expected, plain, marked = rendered(name, [*messages, final], tools)
        assert plain == expected
        assert marked == expected


@pytest.mark.parametrize("name", ["qwen", "replies", "messages"])
def test_reasoning_before_the_text_is_that_of_transformers(name):
    final = {"role": "assistant", "content": "Yes, ", "reasoning_content": "Hm.\n"}
    expected, plain, marked = rendered(name, [{"role": "user", "content": "x"}, final], [])
    assert expected.endswith("Yes, ")
    assert plain == marked == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["The sky is", "1 < 2 [x] |> <", "So \n"])
async def test_the_token_ids_are_those_of_transformers(family, text):
    reference = reference_of(family)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    expected = reference.apply_chat_template(
        as_transformers_wants(family, messages), continue_final_message=True, return_dict=False
    )
    assert await encoded(*ours(reference), messages, end=PromptEnd.LAST_MESSAGE) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_beginning_of_an_answer_can_be_left_out(name):
    messages = as_transformers_wants(name, [{"role": "user", "content": "x"}])
    [expected], _ = render_jinja_template(
        [messages],
        chat_template=TEMPLATES[name],
        add_generation_prompt=False,
        **BOUNDS,
    )
    prompt = template_of(name).render(messages, end=PromptEnd.MESSAGES, max_bytes=1000)
    assert prompt == expected


def test_a_text_that_spells_what_transformers_adds_stays_whole():
    text = "CONTINUE_FINAL_MESSAGE_TAG and OPEN_0 "
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    prompt = ChatTemplate(CHAT_TEMPLATE, {}).render(
        messages, end=PromptEnd.LAST_MESSAGE, max_bytes=1000
    )
    assert prompt.endswith(f"<|im_start|>assistant\n{text}")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show"),
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", "does not show"),
        ("{% for m in messages %}{{ m.content | replace('b', '') }}{% endfor %}", "does not show"),
        ("{{ raise_exception('no: ' + messages[-1].content) }}", "refuses: no: abc$"),
    ],
)
def test_a_text_that_the_template_changes_is_refused(source, told):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "abc"}]
    with pytest.raises(TemplateError, match=told):
        ChatTemplate(source, {}).render(messages, end=PromptEnd.LAST_MESSAGE, max_bytes=1000)
