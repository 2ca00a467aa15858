"""How large a prompt may be, found out at a bounded cost."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request import Conversation, Prompt

MAX_PROMPT_TOKENS = 2**20
"""Token ids of a prompt that comes as such; models take fewer."""
MAX_VALUES = 65_536
"""Objects, lists, texts and numbers of a conversation and its tools; 0.3 us each to measure."""
_NUMBER_BYTES = 8
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def check_prompt_size(prompt: Prompt, max_bytes: int) -> None:
    """Checks a prompt as it came.

    Raises:
        InvalidRequestError: its text is longer than `max_bytes`, its conversation holds more than
            MAX_VALUES values, or there are more than MAX_PROMPT_TOKENS token ids.
    """
    if isinstance(prompt, Conversation):
        num_bytes = _num_bytes([prompt.messages, prompt.tools])
    elif isinstance(prompt, str):
        num_bytes = len(prompt.encode(errors="surrogatepass"))
    else:
        check_num_tokens(len(prompt), MAX_PROMPT_TOKENS)
        return
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"the prompt has {num_bytes} bytes; the limit is {max_bytes}")


def check_num_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequestError if there are too many token ids to be looked at one by one."""
    if num_tokens > max_tokens:
        raise InvalidRequestError(f"there are {num_tokens} token ids; the limit is {max_tokens}")


def _num_bytes(value: Any) -> int:
    """Returns about the bytes that a value takes as JSON.

    Raises:
        InvalidRequestError: it holds more than MAX_VALUES values.
    """
    num_bytes = num_values = 0
    waiting = [value]
    while waiting:
        value = waiting.pop()
        num_values += 1
        if isinstance(value, str):
            num_bytes += len(value.encode(errors="surrogatepass"))
            continue
        if not isinstance(value, Mapping | list | tuple):
            num_bytes += _NUMBER_BYTES
            continue
        num_bytes += len("[]")
        if num_values + len(waiting) + len(value) > MAX_VALUES:
            raise _too_many_values("the conversation")
        if isinstance(value, Mapping):
            num_bytes += sum(len(key.encode(errors="surrogatepass")) for key in value)
            waiting.extend(value.values())
        else:
            waiting.extend(value)
    return num_bytes


def check_json_texts(texts: Iterable[str], what: str) -> None:
    """Checks texts that are to be parsed as JSON.

    Raises:
        InvalidRequestError: all together hold more than MAX_VALUES values.
    """
    texts = list(texts)
    # Marks inside strings count here, which is ten times as cheap as to find the strings.
    if len(texts) + sum(map(_num_marks, texts)) <= MAX_VALUES:
        return
    num_values, num_strings = len(texts), 0
    for text in texts:
        outside, count = _STRING.subn('""', text, count=2 * MAX_VALUES + 1 - num_strings)
        num_strings += count
        num_values += _num_marks(outside)
        if num_values > MAX_VALUES or num_strings > 2 * MAX_VALUES:  # a string is a value or a key
            raise _too_many_values(what)


def _num_marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _too_many_values(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} holds over {MAX_VALUES} values (objects, lists, texts and numbers)"
    )
