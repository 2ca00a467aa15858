"""Rewrites conversations for chat templates that lack tools or system messages.

The tags for tools are those of Hermes and Qwen, so the format `hermes` reads the replies.

Source: NousResearch/Hermes-Function-Calling, README; the chat template of Qwen2.5.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.frontend.text.content_parts import has_images, joined, parts_of
from services.frontend.text.template_forms import Message

_TOOLS_PROMPT = """\
# Tools

These functions can be called. Each line is the signature of one:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as one JSON object between these tags. Several
calls follow each other; their results come back between <tool_response> tags.
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""

_SEES_IMAGE = "The result is an image."
"""A message of the assistant between a tool's result and its image."""


def with_written_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """Returns a conversation with its tools, calls and their results as text.

    The tools end the system message; results are messages of the user, in one with the text that
    follows them.
    """
    written = _joined_users(map(_with_written_calls, messages))
    if not tools:
        return written
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = _TOOLS_PROMPT.format(tools=shown)
    if written[0]["role"] == "system":
        first, *rest = written
        return [{**first, "content": f"{first['content']}\n\n{prompt}"}, *rest]
    return [{"role": "system", "content": prompt}, *written]


def with_system_as_user(
    messages: Sequence[Message], *, shows_first: Callable[[], bool], shows_later: Callable[[], bool]
) -> list[Message]:
    """Returns a conversation whose system messages the template shows.

    Other system messages are said by the user, in one message with the text before or after.

    Args:
        messages: the conversation.
        shows_first: whether the template shows a system message at the beginning.
        shows_later: whether it shows one after other messages.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "system"]
    if not places or (places == [0] and shows_first()):
        return list(messages)
    if shows_later() and (places[0] or shows_first()):
        return list(messages)
    num_leading = sum(place == index for index, place in enumerate(places))
    moved = [_as_user(message) if message["role"] == "system" else message for message in messages]
    if num_leading and shows_first():
        leading = "\n\n".join(message["content"] or "" for message in messages[:num_leading])
        return [{"role": "system", "content": leading}, *_joined_users(moved[num_leading:])]
    return _joined_users(moved)


def with_results_as_user(
    messages: Sequence[Message], *, takes_user_next: Callable[[], bool]
) -> list[Message]:
    """Returns a conversation whose users show the images of tools' results.

    The images of results that follow each other are in one message after the last of them, with
    what the user says next.

    Args:
        messages: the conversation.
        takes_user_next: whether the template takes a user's message after results; if not, one of
            the assistant comes between.
    """
    moved: list[Message] = []
    images: list[Message] = []

    def show() -> None:
        if images and not takes_user_next():
            moved.append({"role": "assistant", "content": _SEES_IMAGE})
        if images:
            moved.append(_AddedMessage(role="user", content=list(images)))
        images.clear()

    for message in messages:
        if message["role"] != "tool":
            show()
        if message["role"] == "tool" and has_images(message["content"]):
            parts = parts_of(message["content"])
            images += [part for part in parts if part["type"] == "image"]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            message = {**message, "content": "".join(texts)}
        moved.append(message)
    show()
    return _joined_users(moved)


def _as_user(message: Message) -> "_AddedMessage":
    return _AddedMessage(role="user", content=message["content"] or "")


class _AddedMessage(dict[str, Any]):
    """A message that no user wrote, which joins the user's messages next to it."""


def _joined_users(messages: Iterable[Message]) -> list[Message]:
    """Joins each added message with the user's messages next to it, as templates want turns."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        if (
            last is not None
            and (last["role"], message["role"]) == ("user", "user")
            and (isinstance(last, _AddedMessage) or isinstance(message, _AddedMessage))
        ):
            content = joined((last["content"], message["content"]), "\n")
            both = {**last, "content": content}
            turns[-1] = _AddedMessage(both) if isinstance(message, _AddedMessage) else both
        else:
            turns.append(message)
    return turns


def _with_written_calls(message: Message) -> Message:
    if message["role"] == "tool":
        content = joined(("<tool_response>\n", message["content"], "\n</tool_response>"))
        return _AddedMessage(role="user", content=content)
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = dict(message)
    del written["tool_calls"]
    functions = [call["function"] for call in calls]
    texts = [
        f'<tool_call>\n{{"name": {json.dumps(each["name"], ensure_ascii=False)},'
        f' "arguments": {each["arguments"]}}}\n</tool_call>'
        for each in functions
    ]
    if message["content"]:
        texts.insert(0, message["content"])
    return {**written, "content": "\n".join(texts)}
