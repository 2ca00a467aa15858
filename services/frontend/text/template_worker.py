"""The process that chat templates run in: `python -m services.frontend.text.template_worker`.

It reads JSON from standard input and answers on standard output, each message behind its length
(four bytes, big-endian): first the template, then one conversation after the other. It has no
environment, opens no files, starts no processes, and has only so much memory.
"""

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from services.frontend.text.chat_template import ChatTemplate, TemplateError

MAX_MEMORY_BYTES = 512 * 2**20
LENGTH = struct.Struct(">I")

Reply = dict[str, str]


def main() -> None:
    """Answers until standard input ends."""
    _limit_resources()
    take, give = sys.stdin.buffer, sys.stdout.buffer
    template: ChatTemplate | None = None
    while (message := _read(take)) is not None:
        reply: Reply = {}
        # Nobody handles the signal, so it ends the process, in the middle of a C function too.
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"])
        try:
            if template is None:
                template = ChatTemplate(message["source"], message["variables"])
            else:
                reply["text"] = template.render(
                    message["messages"], tools=message["tools"], max_bytes=message["max_bytes"]
                )
        except TemplateError as error:
            reply["error"] = str(error)
        except MemoryError:
            reply["error"] = "the chat template needs too much memory"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(give, reply)


def _limit_resources() -> None:
    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _read(take: BinaryIO) -> dict[str, Any] | None:
    head = take.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    [length] = LENGTH.unpack(head)
    message: dict[str, Any] = json.loads(take.read(length))
    return message


def _write(give: BinaryIO, reply: Reply) -> None:
    # Written as it is: an escape takes the frontend ten times as long to read.
    content = json.dumps(reply, ensure_ascii=False).encode(errors="surrogatepass")
    give.write(LENGTH.pack(len(content)) + content)
    give.flush()


if __name__ == "__main__":
    main()
