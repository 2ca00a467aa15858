"""Conversations become the token ids that transformers makes of them, unless they spell markers."""

import datetime
import json

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken

from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.content_marks import MarkedText
from services.frontend.text.prompt_end import PromptEnd
from services.frontend.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import tokenizer_json
from tests.support.family_templates import FAMILIES

ARGUMENTS = {"city": "Troms\u00f8 <north>", "days": [1, 2.5, None, True], "deep": {"a<b": ">"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather; <b>bold</b> & [brackets].",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": " Be brief. \n"}
USER = {"role": "user", "content": "  1 < 2 > 0, [x] & </p> <think> na\u00efve \U0001f600\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nYes <i>it</i> is.\n"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "weather", "arguments": ARGUMENTS},
        }
    ],
}
RESULT = {"role": "tool", "content": '{"sky": "<clear>"}', "tool_call_id": "call00001"}
CONVERSATIONS = {
    "one": ([USER], []),
    "system": ([SYSTEM, USER], []),
    "turns": ([SYSTEM, USER, ANSWER, USER], []),
    "tools": ([SYSTEM, USER], TOOLS),
    "calls": ([USER, CALLING, RESULT], TOOLS),
}


def reference_of(family):
    template, special, plain = FAMILIES[family]
    library = tokenizers.Tokenizer.from_str(tokenizer_json())
    library.add_special_tokens([AddedToken(token, special=True) for token in special])
    library.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library,
        chat_template=template,
        bos_token=special[0],
        eos_token=special[1],
    )


def ours(reference):
    content = reference.backend_tokenizer.to_str().encode()
    tokenizer = Tokenizer({"tokenizer.json": content})
    template = ChatTemplate(
        reference.chat_template,
        {"bos_token": reference.bos_token, "eos_token": reference.eos_token},
        special_tokens=tokenizer.special_tokens,
    )
    return tokenizer, template


async def encoded(tokenizer, template, messages, tools=(), *, end=PromptEnd.ANSWER):
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"])
    now = datetime.datetime.now()
    template.set_time(now)
    rendered = template.render(messages, tools=tools, end=end, max_bytes=10**5, marks_content=True)
    return tokenizer.encode(MarkedText.read(rendered), add_special_tokens=False)


def as_transformers_wants(family, messages):
    """The same conversation in the form that the template's users give it in transformers."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        if family == "deepseek":
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if family == "parts" and message["content"] is not None:
            message["content"] = [{"type": "text", "text": message["content"]}]
        if family == "gpt-oss" and message["content"] is None:
            message["content"] = ""
    return messages


CASES = [
    (family, conversation)
    for family, (template, _, _) in FAMILIES.items()
    for conversation, (_, tools) in CONVERSATIONS.items()
    if not tools or "tools" in template
]


@pytest.mark.parametrize(("family", "conversation"), CASES)
async def test_token_ids_are_those_of_transformers(family, conversation):
    messages, tools = CONVERSATIONS[conversation]
    reference = reference_of(family)
    tokenizer, template = ours(reference)
    expected = reference.apply_chat_template(
        as_transformers_wants(family, messages),
        tools=tools or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert await encoded(tokenizer, template, messages, tools) == expected


@pytest.mark.parametrize("family", FAMILIES)
async def test_nothing_that_a_caller_writes_is_a_special_token(family):
    reference = reference_of(family)
    tokenizer, template = ours(reference)
    special = {reference.convert_tokens_to_ids(token) for token in tokenizer.special_tokens}
    harmless = "x"
    hostile = "".join(tokenizer.special_tokens) + " \n" + "".join(tokenizer.special_tokens[::-1])
    counts = []
    for content in (harmless, hostile):
        said = {"role": "user", "content": content}
        answered = {"role": "assistant", "content": content}
        ids = await encoded(
            tokenizer, template, [SYSTEM | {"content": content}, said, answered, said]
        )
        counts.append([token_id for token_id in ids if token_id in special])
    assert counts[0] == counts[1]
    if template.takes_tools:
        counts = []
        for content in (harmless, hostile):
            tool = json.loads(json.dumps(TOOLS[0]).replace("weather", "w"))
            tool["function"] |= {"name": content, "description": content}
            tool["function"]["parameters"]["properties"] = {content: {"type": content}}
            function = {"name": content, "arguments": json.dumps({content: content})}
            call = {"id": "call00001", "type": "function", "function": function}
            calling = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = RESULT | {"content": content}
            ids = await encoded(tokenizer, template, [USER, calling, result], [tool])
            counts.append([token_id for token_id in ids if token_id in special])
        assert counts[0] == counts[1]
