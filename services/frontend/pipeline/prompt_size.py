"""Measures prompts at a bounded cost."""

import asyncio
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request import Conversation, Prompt, prompts_of
from services.frontend.text.content_marks import MarkedText

MAX_PROMPT_TOKENS = 2**20
"""Limit of token ids in a prompt, if the model's limit is not lower."""
CONTEXT_LENGTH = "context_length_exceeded"
"""The code by which clients know that a conversation must be shortened."""
MAX_VALUES = 32_768
"""Limit of objects, lists, strings and numbers in a conversation and its tools."""
MAX_NUMBER_BITS = 1024
"""Limit of a whole number; writing one as text takes quadratic time."""
_NUMBER_BYTES = 8
_STEP_VALUES = 4096
"""Values measured without a break, about 2 ms."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_prompt_size(prompt: Prompt, *, max_bytes: int, max_tokens: int) -> None:
    """Checks a prompt as received.

    Raises:
        InvalidRequestError: its text is over `max_bytes`, its conversation holds over MAX_VALUES
            values, or it has `max_tokens` token ids or more.
    """
    for single in prompts_of(prompt):
        if isinstance(single, list):
            check_num_tokens(len(single), max_tokens)
            continue
        for _ in _checking(single, max_bytes):
            pass


async def check_text_size(prompt: str | Conversation, *, max_bytes: int) -> None:
    """Checks a prompt like `check_prompt_size`; other tasks run meanwhile."""
    for _ in _checking(prompt, max_bytes):
        await asyncio.sleep(0)


def least_tokens(text: str | MarkedText, longest_token_bytes: int) -> int:
    """Returns a number of tokens that a text certainly has."""
    if isinstance(text, MarkedText):
        num_marks = text.text.count(text.mark)
        num_bytes = len(text.text.encode()) - num_marks * len(text.mark.encode())
    else:
        num_bytes = len(text.encode(errors="surrogatepass"))
    return -(-num_bytes // longest_token_bytes)


def held_bytes(prompt: str | Conversation) -> int:
    """Returns how much memory a prompt's texts take; a character takes one to four bytes."""
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    waiting: list[Any] = [prompt.messages, prompt.tools, prompt.template_variables]
    num_bytes = 0
    while waiting:
        value = waiting.pop()
        num_bytes += sys.getsizeof(value)
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return num_bytes


def _checking(prompt: str | Conversation, max_bytes: int) -> Iterator[None]:
    """Checks a prompt; yields between its steps."""
    if isinstance(prompt, Conversation):
        num_bytes = yield from _num_bytes(
            [prompt.messages, prompt.tools, prompt.template_variables]
        )
    else:
        num_bytes = len(prompt.encode(errors="surrogatepass"))
    if num_bytes > max_bytes:
        raise InvalidRequestError(
            f"the prompt has {num_bytes} bytes; the limit is {max_bytes}", field="prompt"
        )


def check_num_tokens(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequestError if the prompt leaves no room for output."""
    if num_tokens >= max_model_len:
        raise too_many_tokens(str(num_tokens), max_model_len)


def too_many_tokens(num_tokens: str, max_model_len: int) -> InvalidRequestError:
    """Returns the refusal of a prompt that leaves no room for output."""
    return InvalidRequestError(
        # Agents look for these words and numbers, and shorten the conversation.
        f"the prompt is too long: {num_tokens} tokens > {max_model_len}, which prompt and"
        " output together may have",
        field="prompt",
        code=CONTEXT_LENGTH,
    )


def output_room(max_tokens: int, max_model_len: int) -> int:
    """Returns the tokens that a shortened prompt leaves free for `max_tokens` of output.

    That is at most half of the context.
    """
    return max(1, min(max_tokens, max_model_len // 2))


def _num_bytes(value: Any) -> Generator[None, None, int]:
    """Returns a value's approximate JSON size in bytes; yields between its steps.

    Raises:
        InvalidRequestError: it has too many values, or a number is too long.
    """
    num_bytes = num_values = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        num_values += 1
        if num_values % _STEP_VALUES == 0:
            yield
        if isinstance(value, str):
            num_bytes += len(value.encode(errors="surrogatepass"))
            continue
        if not isinstance(value, Mapping | list | tuple):
            if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
                raise InvalidRequestError(
                    f"the conversation has a number of {value.bit_length()} bits;"
                    f" the limit is {MAX_NUMBER_BITS}",
                    field="prompt",
                )
            num_bytes += _NUMBER_BYTES
            continue
        num_bytes += len("[]")
        if num_values + len(waiting) + len(value) > MAX_VALUES:
            raise _too_many_values("the conversation holds")
        if isinstance(value, Mapping):
            num_bytes += sum(len(key.encode(errors="surrogatepass")) for key in value)
            waiting.extend(value.values())
        else:
            waiting.extend(value)
    return num_bytes


def check_json_texts(texts: Iterable[str], what: str) -> None:
    """Checks strings before they are parsed as JSON.

    Raises:
        InvalidRequestError: together they hold over MAX_VALUES values.
    """
    texts = list(texts)
    # Marks inside strings count too: ten times cheaper than finding the strings.
    if len(texts) + sum(map(_num_marks, texts)) <= MAX_VALUES:
        return
    num_values, num_strings = len(texts), 0
    for text in texts:
        outside, count = _STRING.subn('""', text, count=2 * MAX_VALUES + 1 - num_strings)
        num_strings += count
        num_values += _num_marks(outside)
        if num_values > MAX_VALUES or num_strings > 2 * MAX_VALUES:  # a string is a value or a key
            raise _too_many_values(f"{what} hold")


def _num_marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _too_many_values(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} over {MAX_VALUES} values (objects, lists, texts and numbers)",
        field="prompt",
    )
