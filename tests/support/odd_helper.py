"""A helper process that misbehaves as each question says."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.processes.helper_frames import ANSWER_HEADER, AnswerKind
from services.processes.helper_program import Refusal, limit_resources, run_helper

ANSWERS = os.fstat(1)
"""Standard output, before `run_helper` gives its number away."""


def open_odd(opening: bytes) -> Callable[[bytes], bytes]:
    if opening == b"refuse":
        raise Refusal("no opening")
    if opening == b"exit":
        os._exit(3)
    if opening == b"fork" and not os.fork():
        time.sleep(1)  # with the helper's pipes
        os._exit(0)
    limit_resources(max_memory_bytes=2**29)
    return answer


def answer(question: bytes) -> bytes:
    verb, _, rest = question.decode().partition(" ")
    return VERBS[verb](rest).encode()


def _echo(text: str) -> str:
    return text


def _print(text: str) -> str:
    sys.stdout.write("not an answer")
    sys.stdout.flush()
    return text


def _refuse(text: str) -> str:
    raise Refusal(text)


def _hang(_: str) -> str:
    while True:
        time.sleep(60)


def _kill(number: str) -> str:
    os.kill(os.getpid(), int(number))
    signal.pause()
    return ""


def _write(path: str) -> str:
    Path(path).write_text("x")
    return path


def _claim(length: str) -> str:
    """Says that the answer is in memory."""
    os.write(answers_fd(), ANSWER_HEADER.pack(int(length), AnswerKind.IN_MEMORY))
    return _hang("")


def answers_fd() -> int:
    """Returns the pipe that answers go to; the event loop may leave others open."""
    return next(fd for fd in range(3, os.sysconf("SC_OPEN_MAX")) if is_open_as(fd, ANSWERS))


def is_open_as(fd: int, pipe: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), pipe)
    except OSError:
        return False


def _shrink(_: str) -> str:
    try:
        os.ftruncate(int(sys.argv[1]), 0)
    except PermissionError:
        return "refused"
    return "shrunk"


VERBS = {
    "claim": _claim,
    "shrink": _shrink,
    "echo": _echo,
    "print": _print,
    "refuse": _refuse,
    "hang": _hang,
    "kill": _kill,
    "write": _write,
    "exit": lambda status: os._exit(int(status)),
    "pid": lambda _: str(os.getpid()),
    "variables": lambda _: " ".join(sorted(os.environ)),
    "fill": lambda size: "x" * int(size),
}


if __name__ == "__main__":
    run_helper(open_odd)
