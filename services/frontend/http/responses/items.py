"""Converts items to the messages of a conversation."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from services.frontend.http.fields.images import image_of_url
from services.frontend.http.responses.foreign_items import foreign_call, foreign_result
from services.frontend.http.responses.item_schema import (
    AnyCallItem,
    AnyItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    ForeignItem,
    ItemImage,
    ItemText,
    MessageItem,
    Part,
    ReasoningItem,
)
from services.frontend.http.responses.offered_tools import custom_arguments, qualified_name
from services.frontend.pipeline.tools import tool_call_of
from services.frontend.text.chat_template import Message
from services.frontend.text.content_parts import Content, joined

SYSTEM_ROLES = ("system", "developer")
_PREFIXES = {None: "msg", "message": "msg", "function_call": "fc", "reasoning": "rs"}
"""Beginnings of ids by an item's type."""
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[AnyItem])


def messages_of(items: Iterable[Any]) -> list[Message]:
    """Returns the messages of items.

    Reasoning, a message and calls of the model that follow each other are one message.
    """
    messages: list[Message] = []
    turn: dict[str, Any] | None = None
    """The model's message that items may still add to."""
    for item in items:
        if _is_models(item):
            if turn is None or not _fits(item, turn):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add(item, turn)
        if (message := _message_of(item)) is not None:
            messages.append(message)
            turn = None
    return messages


def messages_of_output(output: bytes) -> list[Message]:
    """Returns the messages of output items in JSON."""
    return messages_of(_ITEMS.validate_json(output))


def listed_items(items: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns items in the form in which they are listed; each has an id."""
    return [
        {"id": f"{_PREFIXES.get(item.type, 'item')}_{uuid.uuid4().hex}", **_listed(item)}
        for item in items
    ]


def _listed(item: Any) -> dict[str, Any]:
    fields: dict[str, Any] = item.model_dump(exclude_none=True)
    match item:
        case MessageItem():
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts = [
                _listed_part(part) | ({"type": kind} if "text" in part else {})
                for part in fields["content"]
            ]
            return {"type": "message", "status": "completed", **fields, "content": parts}
        case CallOutputItem():
            if any(isinstance(part, ItemImage) for part in item.output):
                fields["output"] = list(map(_listed_part, fields["output"]))
            else:
                fields["output"] = joined(map(_content_of, item.output))
            return {"status": "completed", **fields}
    return fields


def _listed_part(part: dict[str, Any]) -> dict[str, Any]:
    """Returns a part in which an image has its detail, as the API's do."""
    return {"detail": "auto", **part} if part["type"] == "input_image" else part


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation that begins with instructions.

    They join a system message at its beginning: many templates take only one.
    """
    if instructions is None:
        return list(messages)
    system: Message = {"role": "system", "content": instructions}
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        first = messages[0]
        content = joined((instructions, first["content"]), "\n\n")
        return [{**first, "content": content}, *messages[1:]]
    return [system, *messages]


def _is_models(item: Any) -> bool:
    """Whether an item is part of the model's reply, with something that a model can read."""
    match item:
        case MessageItem():
            return item.role == "assistant"
        case ReasoningItem():
            return bool(item.text)
        case ForeignItem():
            return foreign_call(item) is not None
    return isinstance(item, AnyCallItem)


def _fits(item: Any, turn: dict[str, Any]) -> bool:
    """Whether an item of the model can follow what a message has: reasoning, content, calls."""
    match item:
        case ReasoningItem():
            return turn["content"] is None and "tool_calls" not in turn
        case MessageItem():
            return "tool_calls" not in turn
    return True


def _add(item: Any, turn: dict[str, Any]) -> None:
    match item:
        case ReasoningItem():
            turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
        case MessageItem():
            turn["content"] = joined((turn["content"], *map(_content_of, item.content)))
        case _:
            turn["tool_calls"] = [*turn.get("tool_calls", ()), _call_of(item)]


def _call_of(item: CallItem | CustomCallItem | ForeignItem) -> Message:
    if isinstance(item, ForeignItem):
        call = foreign_call(item)
        assert call is not None, "others are no part of a reply"
        return call
    if isinstance(item, CustomCallItem):
        arguments = custom_arguments(item.input)
    else:
        arguments = item.arguments or ""
    return tool_call_of(item.call_id, qualified_name(item.name, item.namespace), arguments)


def _message_of(item: Any) -> Message | None:
    """Returns an item as a message that is not the model's; None if it has none."""
    match item:
        case MessageItem() if item.role != "assistant":
            return {"role": item.role, "content": joined(map(_content_of, item.content))}
        case CallOutputItem():
            content = joined(map(_content_of, item.output))
            return {"role": "tool", "content": content, "tool_call_id": item.call_id}
        case ForeignItem():
            return foreign_result(item)
    return None


def _content_of(part: Part) -> Content:
    match part:
        case ItemText():
            return part.text
        case ItemImage():
            return image_of_url(part.image_url, part.detail, field="input")
    return part.refusal
