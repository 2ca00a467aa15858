"""Converts items to the messages of a conversation."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from services.frontend.errors import InvalidRequestError
from services.frontend.http.responses.schema import (
    AnyItem,
    CallItem,
    CallOutputItem,
    ItemText,
    MessageItem,
    Part,
    ReasoningItem,
)
from services.frontend.pipeline.tools import json_object, tool_call_of
from services.frontend.text.chat_template import Message

SYSTEM_ROLES = ("system", "developer")
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[AnyItem])


def messages_of(items: Iterable[Any]) -> list[Message]:
    """Returns the messages of items.

    Reasoning, a message and calls of the model that follow each other are one message.

    Raises:
        InvalidRequestError: a call's arguments are not a JSON object.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    """The model's message that items may still add to."""
    for item in items:
        if not _is_models(item):
            messages.append(_message_of(item))
            turn = None
            continue
        if turn is None or not _fits(item, turn):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add(item, turn)
    return list(messages)


def messages_of_output(output: bytes) -> list[Message]:
    """Returns the messages of output items in JSON, without calls that no template can show."""
    return messages_of(
        item
        for item in _ITEMS.validate_json(output)
        if not isinstance(item, CallItem) or _has_object(item)
    )


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation that begins with instructions.

    They join a system message at its beginning: many templates take only one.
    """
    if instructions is None:
        return list(messages)
    system: Message = {"role": "system", "content": instructions}
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = messages[0]
        joined = {**first, "content": f"{instructions}\n\n{first['content']}"}
        return [joined, *messages[1:]]
    return [system, *messages]


def _is_models(item: Any) -> bool:
    """Whether an item is part of the model's reply."""
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return isinstance(item, CallItem | ReasoningItem)


def _fits(item: Any, turn: dict[str, Any]) -> bool:
    """Whether an item of the model can follow what a message has: reasoning, content, calls."""
    match item:
        case ReasoningItem():
            return turn["content"] is None and "tool_calls" not in turn
        case MessageItem():
            return "tool_calls" not in turn
    return True


def _add(item: MessageItem | CallItem | ReasoningItem, turn: dict[str, Any]) -> None:
    match item:
        case ReasoningItem():
            parts = item.content or item.summary or ()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(
                part.text for part in parts
            )
        case MessageItem():
            turn["content"] = (turn["content"] or "") + _text_of(item.content)
        case CallItem():
            call = tool_call_of(item.call_id, item.name, item.arguments)
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]


def _message_of(item: MessageItem | CallOutputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": _text_of(item.content)}
    return {"role": "tool", "content": _text_of(item.output), "tool_call_id": item.call_id}


def _text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text if isinstance(part, ItemText) else part.refusal for part in parts)


def _has_object(call: CallItem) -> bool:
    try:
        json_object(call.arguments, "arguments of a tool call")
    except InvalidRequestError:
        return False
    return True
