"""Converts parsed Messages bodies to the pipeline's types."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from services.frontend.engine_client.messages import SamplingParams, StructuredOutput
from services.frontend.errors import InvalidRequestError
from services.frontend.http.messages import schema
from services.frontend.pipeline.request import Conversation, Options
from services.frontend.pipeline.tools import tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.prompt_end import PromptEnd

ERROR_PREFIX = "Error: "
"""Begins the result of a tool that failed; templates have no other way to say it."""


def conversation_of(request: schema.CountTokensRequest) -> Conversation:
    """Returns the conversation, without tools if the tool choice is "none".

    Raises:
        InvalidRequestError: a tool choice has no tools, or the model's last turn has calls.
    """
    choice = request.tool_choice
    if choice is not None and not request.tools:
        raise InvalidRequestError("tool_choice needs tools", field="tool_choice")
    thinking = request.thinking
    wanted = () if isinstance(choice, schema.ChooseNone) else request.tools or ()
    messages = [each for message in request.messages for each in _messages_of(message)]
    if request.system is not None:
        messages.insert(0, {"role": "system", "content": _text_of(request.system)})
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise InvalidRequestError(
            "messages: the last message has calls, so their results must follow", field="messages"
        )
    return Conversation(
        messages,
        [tool_of(each.name, each.description, each.input_schema) for each in wanted],
        _rules_of(choice, wanted),
        _template_variables(request.output_config),
        reasons=None if thinking is None else not isinstance(thinking, schema.ThinkingDisabled),
        max_reasoning_tokens=(
            thinking.budget_tokens if isinstance(thinking, schema.ThinkingEnabled) else None
        ),
        end=PromptEnd.LAST_MESSAGE if continues else PromptEnd.ANSWER,
    )


def options_of(request: schema.MessagesRequest, request_id: str) -> Options:
    """Returns the options of a reply."""
    named = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    output = request.output_config
    if output is not None and output.format is not None:
        text = json.dumps(output.format.schema_, ensure_ascii=False)
        named["structured_output"] = StructuredOutput(json_schema=text)
    return Options(
        model=request.model,
        request_id=request_id,
        sampling=SamplingParams(
            max_tokens=request.max_tokens,
            **{name: value for name, value in named.items() if value is not None},
        ),
        stop=tuple(request.stop_sequences or ()),
    )


def _rules_of(choice: schema.ToolChoice | None, wanted: Sequence[schema.CustomTool]) -> CallRules:
    is_single = isinstance(choice, schema.ChooseTool) or bool(
        isinstance(choice, schema.ChooseFreely | schema.ChooseAny)
        and choice.disable_parallel_tool_use
    )
    return CallRules(
        is_required=isinstance(choice, schema.ChooseAny | schema.ChooseTool),
        name=choice.name if isinstance(choice, schema.ChooseTool) else "",
        is_single=is_single,
        strict=frozenset(each.name for each in wanted if each.strict),
    )


def _template_variables(output: schema.OutputConfig | None) -> dict[str, Any]:
    if output is None or output.effort is None:
        return {}
    return {"reasoning_effort": output.effort}


def _messages_of(
    message: schema.UserMessage | schema.AssistantMessage | schema.SystemMessage,
) -> Iterator[Message]:
    """Yields the messages of one turn, as chat templates have them."""
    match message:
        case schema.UserMessage():
            yield from _user_messages(message.content)
        case schema.AssistantMessage():
            yield _assistant_message(message.content)
        case schema.SystemMessage():
            yield {"role": "system", "content": _text_of(message.content)}


def _user_messages(
    blocks: Sequence[schema.TextBlock | schema.ToolResultBlock],
) -> Iterator[Message]:
    """Yields a message for each tool result, and one for each run of texts."""
    texts: list[schema.TextBlock] = []
    for block in blocks:
        if isinstance(block, schema.TextBlock):
            texts.append(block)
            continue
        if texts:
            yield {"role": "user", "content": _text_of(texts)}
            texts = []
        content = _text_of(block.content or ())
        yield {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ERROR_PREFIX + content if block.is_error else content,
        }
    if texts or not blocks:
        yield {"role": "user", "content": _text_of(texts)}


def _assistant_message(
    blocks: Sequence[schema.TextBlock | schema.ThinkingBlock | schema.ToolUseBlock],
) -> Message:
    texts = [block for block in blocks if isinstance(block, schema.TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, schema.ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, schema.ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(texts)}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.input, ensure_ascii=False),
                },
            }
            for call in calls
        ]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _text_of(blocks: Sequence[schema.TextBlock]) -> str:
    return "".join(block.text for block in blocks)
