"""The helper's side of `helper_pool`: answers one question after the other, within limits."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

from services.processes.helper_frames import ANSWER_HEADER, QUESTION_HEADER, AnswerKind
from services.processes.message_memory import MessageMemory

_STDOUT_FD = 1
_STDERR_FD = 2


Answer = bytes | Sequence[bytes | memoryview]
"""An answer, or its parts."""


class Refusal(Exception):  # noqa: N818  an answer, not an error of the helper
    """A question has no answer; the message is for the one who asked."""


def run_helper(open_helper: Callable[[bytes], Callable[[bytes], Answer]]) -> None:
    """Answers questions until standard input ends.

    Signals that end its service do not end a helper: the service still drains.

    Args:
        open_helper: takes the opening message and returns the function that answers questions.
            Both may raise `Refusal`; any other error ends the process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    memory = MessageMemory(int(sys.argv[1])) if len(sys.argv) > 1 else None
    with os.fdopen(os.dup(_STDOUT_FD), "wb") as sink:
        os.dup2(_STDERR_FD, _STDOUT_FD)  # what libraries print is no answer
        opening = _read_question(source, memory)
        if opening is None:
            return
        answer: list[Callable[[bytes], Answer]] = []

        def open_with(content: bytes) -> bytes:
            answer.append(open_helper(content))
            return b""

        _answer(sink, memory, open_with, opening)
        while answer and (question := _read_question(source, memory)) is not None:
            _answer(sink, memory, answer[0], question)


def limit_resources(*, max_memory_bytes: int, may_start_threads: bool = False) -> None:
    """Takes from this process what a hostile question could use: memory, forks, files, core dumps.

    Args:
        max_memory_bytes: size of its address space.
        may_start_threads: whether it may have threads, and with them forks. Root always may.
    """
    limits = {resource.RLIMIT_AS: max_memory_bytes, resource.RLIMIT_FSIZE: 0}
    limits[resource.RLIMIT_CORE] = 0
    if not may_start_threads:
        limits[resource.RLIMIT_NPROC] = 0
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        lower = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (lower, lower))


def _read_question(source: BinaryIO, memory: MessageMemory | None) -> tuple[bytes, float] | None:
    """Returns the next question and its limit in seconds, None at the end."""
    header = source.read(QUESTION_HEADER.size)
    if len(header) < QUESTION_HEADER.size:
        return None
    length, timeout_s, is_in_memory = QUESTION_HEADER.unpack(header)
    if is_in_memory:
        assert memory is not None, "the service has given it"
        return memory.read(length), timeout_s
    content = source.read(length)
    return (content, timeout_s) if len(content) == length else None


def _answer(
    sink: BinaryIO,
    memory: MessageMemory | None,
    answer: Callable[[bytes], Answer],
    question: tuple[bytes, float],
) -> None:
    content, timeout_s = question
    # Nothing handles SIGALRM, so it ends the process, in the middle of a C function too. The
    # service's own limit comes first; this one holds when the service is gone or stopped.
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
    kind = AnswerKind.ANSWER
    try:
        reply = answer(content)
    except Refusal as refusal:
        kind, reply = AnswerKind.REFUSAL, str(refusal).encode(errors="replace")
    parts = [reply] if isinstance(reply, bytes) else reply
    length = sum(map(len, parts))
    if kind is AnswerKind.ANSWER and memory is not None and memory.takes(length):
        memory.write(parts)
        kind, parts = AnswerKind.IN_MEMORY, ()
    signal.setitimer(signal.ITIMER_REAL, 0)
    sink.write(b"".join((ANSWER_HEADER.pack(length, kind), *parts)))
    sink.flush()
