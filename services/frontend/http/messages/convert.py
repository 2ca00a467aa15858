"""Converts parsed Messages bodies to the pipeline's types."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from services.frontend.engine_client.messages import SamplingParams, StructuredOutput
from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.hosted_tools import check_hosted, hosted_kind
from services.frontend.http.fields.images import image_of_base64, image_of_url
from services.frontend.http.messages import content_schema, schema
from services.frontend.http.messages.client_tools import function_of
from services.frontend.http.messages.edit_schema import ClearThinking, ClearToolUses
from services.frontend.pipeline.request import Conversation, Options
from services.frontend.pipeline.tools import tool_call_of, tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.content_parts import Content, joined
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
    tools = [tool for each in enumerate(wanted) for tool in _tools_of(*each)]
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
        tools,
        _rules_of(choice, wanted),
        _template_variables(request.output_config),
        reasons=None if thinking is None else not isinstance(thinking, schema.ThinkingDisabled),
        max_reasoning_tokens=(
            thinking.budget_tokens if isinstance(thinking, schema.ThinkingEnabled) else None
        ),
        end=PromptEnd.LAST_MESSAGE if continues else PromptEnd.ANSWER,
    )


def left_out(request: schema.CountTokensRequest, *, is_strict: bool) -> Sequence[str]:
    """Returns the kinds of hosted tools that the model does not get.

    Raises:
        InvalidRequestError: the request is not served without one of them.
    """
    choice = request.tool_choice
    named = choice.name if isinstance(choice, schema.ChooseTool) else None
    tools = [(each, hosted_kind(each.type or "")) for each in request.tools or ()]
    kinds = {kind for _, kind in tools if kind is not None}
    if request.mcp_servers:
        kinds.add("mcp")
    return check_hosted(
        sorted(kinds),
        has_others=any(kind is None for _, kind in tools) or isinstance(choice, schema.ChooseNone),
        demanded=next((kind for each, kind in tools if kind and each.name == named), None),
        is_strict=is_strict,
    )


def edits_of(request: schema.CountTokensRequest) -> Sequence[ClearThinking | ClearToolUses] | None:
    """Returns the edits that may change the conversation; None if edits are not asked for."""
    wanted = request.context_management
    if wanted is None:
        return None
    return [
        each
        for each in wanted.edits or ()
        if isinstance(each, ClearToolUses) or each.num_kept is not None
    ]


def shows_thinking(request: schema.CountTokensRequest) -> bool:
    """Whether the answer has the text of its thinking."""
    wanted = request.thinking
    return not (isinstance(wanted, schema.ShownThinking) and wanted.display == "omitted")


def options_of(request: schema.MessagesRequest, request_id: str) -> Options:
    """Returns the options of a reply."""
    named = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
    output = request.output_config
    form = request.output_format or (None if output is None else output.format)
    if form is not None:
        text = json.dumps(form.schema_, ensure_ascii=False)
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


def _tools_of(place: int, tool: schema.MessageTool | schema.VendorTool) -> Iterator[Message]:
    """Yields a tool as a function; nothing for a hosted one.

    Raises:
        InvalidRequestError: its type is not known.
    """
    if isinstance(tool, schema.MessageTool):
        description = tool.description
        if tool.input_examples:
            examples = "\n".join(
                json.dumps(each, ensure_ascii=False) for each in tool.input_examples
            )
            description = f"{description or ''}\nExamples of its input:\n{examples}".lstrip()
        yield tool_of(tool.name, description, tool.input_schema)
        return
    if hosted_kind(tool.type) is not None:
        return
    function = function_of(tool.type)
    if function is None or tool.name is None:
        raise InvalidRequestError(
            f"tools.{place}.type: {tool.type[:64]!r} is not supported here; functions are",
            field="tools",
        )
    yield tool_of(tool.name, *function)


def _rules_of(choice: schema.ToolChoice | None, wanted: Sequence[schema.AnyTool]) -> CallRules:
    is_single = isinstance(choice, schema.ChooseTool) or bool(
        isinstance(choice, schema.ChooseFreely | schema.ChooseAny)
        and choice.disable_parallel_tool_use
    )
    return CallRules(
        is_required=isinstance(choice, schema.ChooseAny | schema.ChooseTool),
        name=choice.name if isinstance(choice, schema.ChooseTool) else "",
        is_single=is_single,
        strict=frozenset(
            each.name for each in wanted if isinstance(each, schema.MessageTool) and each.strict
        ),
    )


def _template_variables(output: schema.OutputConfig | None) -> dict[str, Any]:
    if output is None or output.effort is None:
        return {}
    return {"reasoning_effort": output.effort}


def _messages_of(
    message: content_schema.UserMessage
    | content_schema.AssistantMessage
    | content_schema.SystemMessage,
) -> Iterator[Message]:
    """Yields the messages of one turn, as chat templates have them."""
    match message:
        case content_schema.UserMessage():
            yield from _user_messages(message.content)
        case content_schema.AssistantMessage():
            yield _assistant_message(message.content)
        case content_schema.SystemMessage():
            yield {"role": "system", "content": _text_of(message.content)}


def _user_messages(blocks: Sequence[content_schema.UserBlock]) -> Iterator[Message]:
    """Yields a message for each tool result, and one for each run of texts and images."""
    said: list[Content] = []
    for block in blocks:
        if not isinstance(block, content_schema.ToolResultBlock):
            said.append(_content_of(block))
            continue
        if said:
            yield {"role": "user", "content": joined(said)}
            said = []
        prefix = ERROR_PREFIX if block.is_error else ""
        yield {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": joined([prefix, *map(_content_of, block.content or ())]),
        }
    if said or not blocks:
        yield {"role": "user", "content": joined(said)}


def _content_of(block: content_schema.ResultBlock) -> Content:
    if not isinstance(block, content_schema.ImageBlock):
        return block.text
    source = block.source
    if source.url is not None:
        return image_of_url(source.url, None, field="messages")
    return image_of_base64(source.data or "", field="messages")


def _assistant_message(blocks: Sequence[content_schema.AssistantBlock]) -> Message:
    texts = [block for block in blocks if isinstance(block, content_schema.TextBlock)]
    thoughts = "".join(
        block.thinking for block in blocks if isinstance(block, content_schema.ThinkingBlock)
    )
    calls = [block for block in blocks if isinstance(block, content_schema.ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(texts)}
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            tool_call_of(call.id, call.name, json.dumps(call.input or {}, ensure_ascii=False))
            for call in calls
        ]
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def _text_of(blocks: Sequence[content_schema.TextBlock]) -> str:
    return "".join(block.text for block in blocks)
