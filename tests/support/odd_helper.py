"""A helper process that misbehaves as each question says."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.processes.helper_program import Refusal, limit_resources, run_helper


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


VERBS = {
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
