"""The process that parses large bodies, started by `reader`.

The opening message has the parsers and the limits; a question is the length of its head (four
bytes, big-endian), the head, and the body. Openings, heads and answers are pickled: only this code
writes them.
"""

import os
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call, ReadCall
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS, check_prompt_size
from services.frontend.pipeline.request import check_options, prompts_of
from services.processes.helper_program import limit_resources, run_helper

MAX_MEMORY_BYTES = 2**30
MAX_CONTAINERS = 65_536
"""Objects and lists in a body."""
MAX_KEYS = 131_072
"""Keys of all objects in a body."""
MAX_ITEMS = MAX_PROMPT_TOKENS + MAX_KEYS
"""Entries of all objects and lists in a body."""
_LENGTH = struct.Struct(">I")
_NICENESS = 5
"""The event loop has priority on a shared core."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The arguments of an InvalidRequestError for a body."""

    message: str
    field: str | None
    code: str | None = None


def question_of(
    read: ReadCall[Call], request_id: str, max_prompt_tokens: int, body: bytes
) -> bytes:
    """Returns the question about a body; `read` is named by its module."""
    head = pickle.dumps((read, request_id, max_prompt_tokens), pickle.HIGHEST_PROTOCOL)
    return b"".join((_LENGTH.pack(len(head)), head, body))


def open_worker(opening: bytes) -> Callable[[bytes], bytes]:
    """Loads the parsers, takes the limits, and returns the function that answers questions."""
    os.nice(_NICENESS)
    limits: dict[str, int]
    _, limits = pickle.loads(opening)
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES)

    def answer(question: bytes) -> bytes:
        [length] = _LENGTH.unpack_from(question)
        start = _LENGTH.size + length
        head: tuple[ReadCall[Call], str, int] = pickle.loads(question[_LENGTH.size : start])
        return pickle.dumps(
            _answer(question[start:], *head, limits=limits), pickle.HIGHEST_PROTOCOL
        )

    return answer


def _answer(
    body: bytes,
    read: ReadCall[Call],
    request_id: str,
    max_prompt_tokens: int,
    *,
    limits: dict[str, int],
) -> Call | Refusal:
    try:
        check_structure(body)
        call = read(body, request_id, is_strict=bool(limits["strict_fields"]))
        is_cut = call.options.truncate_prompt_tokens is not None
        with call.naming_fields():
            check_prompt_size(
                call.prompt,
                max_bytes=limits["max_prompt_bytes"],
                max_tokens=MAX_PROMPT_TOKENS if is_cut else max_prompt_tokens,
            )
            num_prompts = len(prompts_of(call.prompt))
            check_options(call.options, max_samples=limits["max_samples"], num_prompts=num_prompts)
    except InvalidRequestError as error:
        return Refusal(str(error), error.field, error.code)
    except MemoryError:
        return Refusal("the body takes too much memory to read", None)
    return call


def check_structure(body: bytes) -> None:
    """Counts the structure of a body without creating objects.

    Raises:
        InvalidRequestError: it has too many objects, lists, keys or entries.
    """
    # Each string is a key or an entry; stop searching past the limits.
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
    # Pickle needs the same module names at both ends; here this module is __main__.
    from services.frontend.http.bodies import worker

    run_helper(worker.open_worker)
