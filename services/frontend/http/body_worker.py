"""The process that reads large bodies; `body_reader` starts it.

The opening message has the limits, as JSON. A question is the length of its head (four bytes,
big-endian), the head, as JSON, and the body. An answer is pickled: both ends run this code, and
nothing that a caller sends is unpickled.
"""

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.errors import InvalidRequestError
from services.frontend.http.calls import Call, ReadCall, read_chat, read_completion
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS, check_prompt_size
from services.frontend.pipeline.request import check_options
from services.processes.helper_program import limit_resources, run_helper

MAX_MEMORY_BYTES = 2**30
MAX_CONTAINERS = 65_536
"""Objects and lists of a body."""
MAX_KEYS = 131_072
"""Keys of all objects of a body."""
MAX_ITEMS = MAX_PROMPT_TOKENS + MAX_KEYS
"""Entries of all objects and lists of a body."""
_LENGTH = struct.Struct(">I")
_NICENESS = 5
"""The event loop comes first where they share a core."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_READERS: dict[str, ReadCall] = {"completion": read_completion, "chat": read_chat}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a body is refused: the arguments of InvalidRequestError."""

    message: str
    field: str | None


def question_of(reader: str, request_id: str, max_prompt_tokens: int, body: bytes) -> bytes:
    """Returns the question about a body: one of _READERS reads it, as `request_id`."""
    head = json.dumps([reader, request_id, max_prompt_tokens]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, body))


def open_worker(opening: bytes) -> Callable[[bytes], bytes]:
    """Takes the limits and returns the function that reads bodies."""
    os.nice(_NICENESS)
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES)
    limits: dict[str, int] = json.loads(opening)

    def read(question: bytes) -> bytes:
        [length] = _LENGTH.unpack_from(question)
        start = _LENGTH.size + length
        head: tuple[str, str, int] = json.loads(question[_LENGTH.size : start])
        answer = _answer(question[start:], *head, limits=limits)
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)

    return read


def _answer(
    body: bytes, reader: str, request_id: str, max_prompt_tokens: int, *, limits: dict[str, int]
) -> Call | Refusal:
    try:
        check_structure(body)
        call = _READERS[reader](body, request_id)
        check_prompt_size(
            call.prompt, max_bytes=limits["max_prompt_bytes"], max_tokens=max_prompt_tokens
        )
        check_options(call.options, max_samples=limits["max_samples"])
    except InvalidRequestError as error:
        return Refusal(str(error), error.field)
    except MemoryError:
        return Refusal("the body takes too much memory to read", None)
    return call


def check_structure(body: bytes) -> None:
    """Counts what a body holds, without making objects of it.

    Raises:
        InvalidRequestError: it holds too many objects, lists, keys or entries.
    """
    # Each string is a key or an entry; those beyond the limits need not be found.
    outside, num_strings = _STRING.subn(b'""', body, count=MAX_KEYS + MAX_ITEMS)
    num_containers = outside.count(b"{") + outside.count(b"[")
    for what, number, limit in (
        ("strings", num_strings, MAX_KEYS + MAX_ITEMS - 1),
        ("objects and lists", num_containers, MAX_CONTAINERS),
        ("keys", outside.count(b":"), MAX_KEYS),
        ("entries", outside.count(b",") + num_containers, MAX_ITEMS),
    ):
        if number > limit:
            raise InvalidRequestError(f"the body holds over {limit} {what}, which is the limit")


if __name__ == "__main__":
    # Pickled names must mean the same at both ends, and this module is called __main__ here.
    from services.frontend.http import body_worker

    run_helper(body_worker.open_worker)
