"""The process that reads large bodies: `python -m services.frontend.http.body_worker`.

It takes requests on standard input and answers on standard output. Each message is pickled, after
its length in bytes (four bytes, big-endian). Both ends run this code, and nothing that a caller
sends is unpickled. The process has no environment, and only so much memory and time.
"""

import os
import pickle
import re
import resource
import signal
import struct
import sys
from dataclasses import dataclass
from typing import BinaryIO

from services.frontend.errors import InvalidRequestError
from services.frontend.http.calls import Call, ReadCall, read_chat, read_completion
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS, check_prompt_size
from services.frontend.pipeline.request import check_options

MAX_MEMORY_BYTES = 2**30
MAX_CONTAINERS = 65_536
"""Objects and lists of a body."""
MAX_KEYS = 131_072
"""Keys of all objects of a body."""
MAX_ITEMS = MAX_PROMPT_TOKENS + MAX_KEYS
"""Entries of all objects and lists of a body."""
LENGTH = struct.Struct(">I")
_NICENESS = 5
"""The event loop comes first where they share a core."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_READERS: dict[str, ReadCall] = {"completion": read_completion, "chat": read_chat}


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done with the body that follows."""

    reader: str
    """One of _READERS."""
    request_id: str
    max_prompt_bytes: int
    max_prompt_tokens: int
    max_samples: int
    timeout_s: float
    num_bytes: int
    """The body's length."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a body is refused: what InvalidRequestError says."""

    message: str
    field: str | None


def main() -> None:
    """Answers until standard input ends."""
    os.nice(_NICENESS)
    for limit, value in ((resource.RLIMIT_DATA, MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    take, give = sys.stdin.buffer, sys.stdout.buffer
    _send(give, b"")  # ready
    while (head := _read_task(take)) is not None:
        # Nobody handles the signal, so it ends the process, in the middle of a C function too.
        signal.setitimer(signal.ITIMER_REAL, head.timeout_s)
        answer = pickle.dumps(_answer(head, take.read(head.num_bytes)), pickle.HIGHEST_PROTOCOL)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(give, answer)


def _send(give: BinaryIO, content: bytes) -> None:
    give.write(LENGTH.pack(len(content)) + content)
    give.flush()


def _read_task(take: BinaryIO) -> Task | None:
    head = take.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    task = pickle.loads(take.read(LENGTH.unpack(head)[0]))
    assert isinstance(task, Task), "the frontend sends nothing else"
    return task


def _answer(task: Task, body: bytes) -> Call | Refusal:
    try:
        check_structure(body)
        call = _READERS[task.reader](body, task.request_id)
        check_prompt_size(
            call.prompt, max_bytes=task.max_prompt_bytes, max_tokens=task.max_prompt_tokens
        )
        check_options(call.options, max_samples=task.max_samples)
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

    body_worker.main()
