"""Tools that a conversation may use, as chat templates of model hubs expect them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.text.chat_template import Message

MAX_TOOLS = 128
MAX_DIGITS = 300
"""Longest whole number in JSON that comes as text."""


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Message:
    """Returns a tool: a function with a JSON Schema of its parameters.

    Raises:
        InvalidRequestError: it has no name.
    """
    if not name:
        raise InvalidRequestError("a tool has no name", field="tools")
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def tool_call_of(call_id: str, name: str, arguments: str) -> Message:
    """Returns a call that the model made earlier, its arguments as the text that they are.

    Raises:
        InvalidRequestError: it has no name, or the arguments are not a JSON object.
    """
    if not name:
        raise InvalidRequestError("a tool call names no function", field="messages")
    call: dict[str, Any] = {"id": call_id} if call_id else {}
    json_object(arguments, "arguments of a tool call")  # templates that want an object get one
    function = {"name": name, "arguments": arguments}
    return call | {"type": "function", "function": function}


def json_object(text: str, what: str) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidRequestError: the text is none.
    """
    try:
        value = json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the {what} are not a JSON object", field="messages")
    return value


def _whole_number(digits: str) -> int:
    """Reads a number that is not so long that it takes time in the square of its length."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def check_tools(messages: Sequence[Message], tools: Sequence[Message]) -> None:
    """Checks that calls and results of tools belong together.

    Raises:
        InvalidRequestError: there are too many tools, a call stands in another role's message, or a
            result answers no earlier call.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"there are {len(tools)} tools; the limit is {MAX_TOOLS}", field="tools"
        )
    known: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls", ())
        if calls and message["role"] != "assistant":
            raise InvalidRequestError(
                f"a message of {message['role']!r} has tool calls; only the assistant's may",
                field="messages",
            )
        known.update(call["id"] for call in calls if "id" in call)
        answered = message.get("tool_call_id")
        if answered is not None and (message["role"] != "tool" or answered not in known):
            raise InvalidRequestError(
                f"tool_call_id is {answered[:64]!r}, which no earlier tool call has",
                field="messages",
            )
