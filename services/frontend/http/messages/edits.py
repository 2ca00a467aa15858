"""Clears parts of a conversation, as a Messages body wants."""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence

from services.frontend.http.messages.answer_schema import AppliedEdit
from services.frontend.http.messages.edit_schema import ClearThinking, ClearToolUses, InputTokens
from services.frontend.pipeline.request import Conversation
from services.frontend.text.chat_template import Message

CLEARED = "[cleared to shorten the conversation]"
"""Replaces the result of a tool call."""
CountTokens = Callable[[Conversation], Awaitable[int]]
"""Returns the number of a prompt's tokens."""


async def edited(
    conversation: Conversation, edits: Sequence[ClearThinking | ClearToolUses], count: CountTokens
) -> tuple[Conversation, list[AppliedEdit]]:
    """Returns a conversation after the edits, and the edits that changed it in the API's form.

    The prompt is tokenized with `count`, once more than there are edits.
    """
    applied: list[AppliedEdit] = []
    num_tokens = await count(conversation)
    for edit in edits:
        told: AppliedEdit = {"type": edit.type, "cleared_input_tokens": 0}
        if isinstance(edit, ClearThinking):
            messages, number = _without_thinking(conversation.messages, edit)
            told["cleared_thinking_turns"] = number
        else:
            messages, number = _without_results(conversation.messages, edit, num_tokens)
            told["cleared_tool_uses"] = number
        if not number:
            continue
        shorter = dataclasses.replace(conversation, messages=messages)
        num_left = await count(shorter)
        num_cleared = max(0, num_tokens - num_left)
        if isinstance(edit, ClearToolUses) and num_cleared < edit.least_tokens:
            continue
        conversation, num_tokens = shorter, num_left
        applied.append({**told, "cleared_input_tokens": num_cleared})
    return conversation, applied


def _without_thinking(
    messages: Sequence[Message], edit: ClearThinking
) -> tuple[list[Message], int]:
    """Returns messages without the thinking of earlier turns, and the number of these turns.

    A turn is all that the model says until the user does; results of tools do not end it.
    """
    turns: list[list[int]] = []
    is_new = True
    for place, message in enumerate(messages):
        if message["role"] == "user":
            is_new = True
        elif "reasoning_content" in message:
            if is_new:
                turns.append([])
            turns[-1].append(place)
            is_new = False
    num_kept = len(turns) if edit.num_kept is None else edit.num_kept
    old = turns[: max(0, len(turns) - num_kept)]
    cleared = {place for turn in old for place in turn}
    return [
        _without_reasoning(message) if place in cleared else message
        for place, message in enumerate(messages)
    ], len(old)


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _without_results(
    messages: Sequence[Message], edit: ClearToolUses, num_tokens: int
) -> tuple[list[Message], int]:
    """Returns messages without earlier results of tools, and the number of their calls."""
    names = {call["id"]: call["function"]["name"] for call in _calls(messages)}
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    reached = num_tokens if isinstance(edit.trigger, InputTokens) else len(answered)
    if reached < edit.trigger.value:
        return list(messages), 0
    old = answered[: max(0, len(answered) - edit.keep.value)]
    cleared = {each for each in old if names.get(each) not in (edit.exclude_tools or ())}
    return [_without_use(message, edit, cleared) for message in messages], len(cleared)


def _without_use(message: Message, edit: ClearToolUses, cleared: set[str]) -> Message:
    """Returns a message without the cleared result that it is, or the inputs of cleared calls."""
    if message["role"] == "tool" and message["tool_call_id"] in cleared:
        return {**message, "content": CLEARED}
    calls = message.get("tool_calls")
    if not calls or not edit.clear_tool_inputs:
        return message
    return {**message, "tool_calls": [_without_input(call, edit, cleared) for call in calls]}


def _without_input(call: Message, edit: ClearToolUses, cleared: set[str]) -> Message:
    function = call["function"]
    if call["id"] not in cleared or not edit.clears_input_of(function["name"]):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def _calls(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        yield from message.get("tool_calls", ())
