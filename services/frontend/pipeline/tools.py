"""Tools of a conversation, in the form that chat templates expect."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.reply.call_rules import CallRules
from services.frontend.reply.reply_reader import Tools
from services.frontend.text.chat_template import Message
from services.frontend.text.surrogates import without_escaped_halves

MAX_TOOLS = 128
MAX_DIGITS = 300
"""Limit of a whole number in JSON given as text."""
MAX_DEPTH = 64
"""Levels of objects and lists in the arguments of a call."""
INVALID_ARGUMENTS = "INVALID_JSON"
"""The key of arguments that are no JSON object; its value is their text.

Source: the advice on invalid tool input in Anthropic's guide to fine-grained tool streaming.
"""


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Message:
    """Returns a function tool with a JSON Schema of its parameters.

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
    """Returns a previous tool call of the model, with its arguments as text of a JSON object.

    Empty text and null are no arguments.

    Raises:
        InvalidRequestError: it has no name.
    """
    if not name:
        raise InvalidRequestError("a tool call names no function", field="messages")
    call: dict[str, Any] = {"id": call_id} if call_id else {}
    is_empty = arguments.strip() in ("", "null")
    function = {"name": name, "arguments": "{}" if is_empty else arguments_text(arguments)}
    return call | {"type": "function", "function": function}


def arguments_text(written: str) -> str:
    """Returns the arguments that a model wrote as text of a JSON object that every reader takes.

    An object is returned as it is written. Other text, such as that of a call that was cut off,
    becomes the value of INVALID_ARGUMENTS: so each API can return it, and each template show it.
    """
    try:
        value = json.loads(
            written,
            parse_int=_whole_number,
            parse_float=_finite_number,
            parse_constant=_finite_number,
        )
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or _is_deeper(value, MAX_DEPTH):
        return json.dumps({INVALID_ARGUMENTS: written}, ensure_ascii=False)
    return without_escaped_halves(written.encode()).decode()


def json_object(text: str, what: str) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        InvalidRequestError: the text is not a JSON object.
    """
    try:
        value = json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the {what} are not a JSON object", field="messages")
    return value


def _whole_number(digits: str) -> int:
    """Parses a whole number within the limit; parsing takes quadratic time."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_number(digits: str) -> float:
    """Parses a number that is finite: Python would write others as words that JSON lacks."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:MAX_DIGITS]}")
    return number


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether a value has more levels of objects and lists than `depth`."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(child, depth - 1) for child in children)


def schemas_of(tools: Sequence[Message]) -> Tools:
    """Returns the JSON Schema of the parameters of each tool."""
    functions = (tool["function"] for tool in tools)
    return {function["name"]: function.get("parameters", {}) for function in functions}


def check_tools(messages: Sequence[Message], tools: Sequence[Message], rules: CallRules) -> None:
    """Checks that tool calls and results match, and that a demanded tool is there.

    Raises:
        InvalidRequestError: there are too many tools, a message of another role has a call, a
            result answers no earlier call, or a demanded tool is missing.
    """
    names = {tool["function"]["name"] for tool in tools}
    if rules.is_required and not names:
        raise InvalidRequestError(
            "tool_choice demands a call and there are no tools", field="tools"
        )
    if rules.name and rules.name not in names:
        raise InvalidRequestError(
            f"tool_choice names {rules.name[:64]!r}, which is not among the tools",
            field="tool_choice",
        )
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"there are {len(tools)} tools; the limit is {MAX_TOOLS}", field="tools"
        )
    known: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls", ())
        if "reasoning_content" in message and message["role"] != "assistant":
            raise InvalidRequestError(
                f"a message of {message['role']!r} has reasoning; only the assistant's may",
                field="messages",
            )
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
