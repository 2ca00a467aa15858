"""Drops the oldest turns of a conversation that is too long for the model."""

from collections.abc import Awaitable, Callable, Sequence

from services.frontend.http.responses.items import SYSTEM_ROLES
from services.frontend.text.chat_template import Message


async def truncated(
    messages: Sequence[Message], fits: Callable[[Sequence[Message]], Awaitable[bool]]
) -> Sequence[Message]:
    """Returns the messages without as many of the oldest turns as make them fit.

    A turn begins with a user's message. System messages at the beginning stay, and so does the last
    turn, even if it does not fit.
    """
    shorter = _shorter(messages)
    low, high = 0, len(shorter) - 1
    while low < high:
        middle = (low + high) // 2 if low else 0  # most conversations fit as they are
        if await fits(shorter[middle]):
            high = middle
        else:
            low = middle + 1
    return shorter[low]


def _shorter(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Returns the conversation, then the same without its first turn, its first two, and so on."""
    num_system = next(
        (i for i, each in enumerate(messages) if each["role"] not in SYSTEM_ROLES), len(messages)
    )
    starts = [i for i in range(num_system + 1, len(messages)) if messages[i]["role"] == "user"]
    return [messages, *([*messages[:num_system], *messages[start:]] for start in starts)]
