"""Finds out which form of a conversation a template expects.

Some templates ignore plain text, fail on arguments of tool calls that are objects, or write "None"
for absent content. Rendering a small conversation in both forms shows it, as in minja
(google/minja, chat-template.hpp, `chat_template_caps`); reading the source fails on macros.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from services.frontend.text.content_parts import text_part

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str | None]
"""Renders a conversation with some tools; returns None if the template fails."""

_NEEDLE = "octavo-needle"
_ARGUMENTS = {_NEEDLE: "thread"}
_CALL_ID = "call00001"
"""Some templates require exactly nine letters and digits."""
_IMAGE: Message = {"type": "image"}
_PROBED_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Other roles use the form of user messages."""


class TemplateForms:
    """Converts conversations to the forms that one template expects, found on first use."""

    def __init__(self, render: Render) -> None:
        """Probes with `render`, which must not raise."""
        self._render = render
        self._wants_parts: dict[str, bool] = {}
        self._takes_images: dict[str, bool] = {}

    @cached_property
    def shows_system(self) -> bool:
        """Whether the template shows a system message at the beginning."""
        return any(self._shows_content("system", content) for content in (_NEEDLE, _parts(_NEEDLE)))

    @cached_property
    def shows_later_system(self) -> bool:
        """Whether the template shows a system message after other messages."""
        filler = self._filler()
        said = [{"role": role, "content": filler} for role in ("user", "assistant", "user")]
        return any(
            _NEEDLE in (self._render([*said[:2], message, said[2]], ()) or "")
            for message in (
                {"role": "system", "content": content} for content in (_NEEDLE, _parts(_NEEDLE))
            )
        )

    def takes_images(self, role: str) -> bool:
        """Whether the template shows images that are parts of a role's messages."""
        if role not in self._takes_images:
            self._takes_images[role] = any(
                self._shows_image(role, filler) for filler in ("x", _parts("x"))
            )
        return self._takes_images[role]

    @cached_property
    def takes_user_after_results(self) -> bool:
        """Whether the template shows a user's message that follows the results of tools."""
        filler = self._filler()
        result = _conversation("tool", filler, filler)
        said = [*result, {"role": "user", "content": _parts(_NEEDLE)}]
        return _NEEDLE in (self._render(said, ()) or "")

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation in the template's form."""
        return [self._fit(message) for message in messages]

    def fit_tools(self, tools: Sequence[Message]) -> list[Message]:
        """Returns tools in the template's form: with all keys if it fails on one without some."""
        whole = [_whole(tool) for tool in tools]
        return whole if whole != list(tools) and self._takes_only_whole_tools else list(tools)

    @cached_property
    def _takes_only_whole_tools(self) -> bool:
        asking = [{"role": "user", "content": self._filler()}]
        tool: Message = {"type": "function", "function": {"name": "f"}}
        return (
            self._render(asking, [tool]) is None
            and self._render(asking, [_whole(tool)]) is not None
        )

    def _filler(self) -> Any:
        return _parts("x") if self._takes_only_parts("user") else "x"

    def _fit(self, message: Message) -> Message:
        fitted = dict(message)
        content, calls = message.get("content"), message.get("tool_calls")
        if calls:
            takes_text, wants_content = self._call_forms
            fitted["tool_calls"] = [_with_arguments(call, as_text=takes_text) for call in calls]
            if content is None and wants_content:
                fitted["content"] = ""
        if isinstance(content, str) and self._takes_only_parts(message["role"]):
            fitted["content"] = _parts(content)
        return fitted

    def _takes_only_parts(self, role: str) -> bool:
        if role not in _PROBED_ROLES:
            role = "user"
        if role not in self._wants_parts:
            shown_text = self._shows_content(role, _NEEDLE)
            shown_parts = not shown_text and self._shows_content(role, _parts(_NEEDLE))
            # A template that shows neither may refuse the role or serve another purpose.
            self._wants_parts[role] = shown_parts
            if not shown_text and not shown_parts and role != "user":
                self._wants_parts[role] = self._takes_only_parts("user")
        return self._wants_parts[role]

    def _shows_content(self, role: str, content: Any) -> bool:
        filler = "x" if isinstance(content, str) else _parts("x")
        return _NEEDLE in (self._render(_conversation(role, content, filler), ()) or "")

    def _shows_image(self, role: str, filler: Any) -> bool:
        text, both = (
            self._render(_conversation(role, parts, filler), ())
            for parts in (_parts(_NEEDLE), [_IMAGE, *_parts(_NEEDLE)])
        )
        # A template that takes texts alone may write the list as Python does.
        return (
            text is not None
            and both is not None
            and _NEEDLE in both
            and text != both
            and repr(_IMAGE) not in both
        )

    @cached_property
    def _call_forms(self) -> tuple[bool, bool]:
        """Whether arguments must be text, and whether content must not be None."""
        takes_text = self._takes_only_text_arguments()
        arguments = json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS
        absent, empty = (self._render_call(arguments, content) for content in (None, ""))
        says_none = absent is None or ("None" in absent and "None" not in (empty or ""))
        return takes_text, says_none and empty is not None

    def _takes_only_text_arguments(self) -> bool:
        for content in ("", None):
            as_object = self._render_call(_ARGUMENTS, content)
            # Models are not trained on Python's dict notation.
            if as_object is not None and repr(_ARGUMENTS) not in as_object:
                return False
            text = json.dumps(_ARGUMENTS)
            if text in (self._render_call(text, content) or ""):
                return True
        return False

    def _render_call(self, arguments: Any, content: str | None) -> str | None:
        asking = {"role": "user", "content": self._filler()}
        return self._render([asking, _calling(arguments, content)], ())


def _conversation(role: str, content: Any, filler: Any) -> list[Message]:
    """Returns a conversation with a message of a role, in which others say `filler`."""
    message: Message = {"role": role, "content": content}
    user: Message = {"role": "user", "content": filler}
    match role:
        case "user":
            return [message]
        case "assistant":
            return [user, message, user]
        case "tool":
            message = {**message, "tool_call_id": _CALL_ID}
            return [user, _calling(_ARGUMENTS, filler), message]
    return [message, user]


def _calling(arguments: Any, content: Any) -> Message:
    call = {
        "id": _CALL_ID,
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _whole(tool: Message) -> Message:
    """Returns a function with a description and properties, which callers may leave out."""
    function = tool.get("function")
    if function is None:
        return tool
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _parts(text: str) -> list[Message]:
    return [text_part(text)]


def _with_arguments(call: Message, *, as_text: bool) -> Message:
    function = call["function"]
    if as_text or not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
