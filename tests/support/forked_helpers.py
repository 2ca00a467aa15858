"""Helper processes that are forked from a process that has their modules, instead of started.

They are processes of their own with the command line, the environment and the pipes that a service
gives them.
"""

import asyncio
import contextlib
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.processes.child import child_command
from tests.support.forked_workers import ForkedProcess
from tests.support.forks import fork, fork_server

_OF_TEXTS = (
    "services.engine.grammar.probe",
    "services.frontend.text.template_worker",
    "services.frontend.text.tokenizer_worker",
)
_OF_BODIES = ("services.frontend.http.app", "tests.support.faulty_body_worker")
SERVERS = {
    **dict.fromkeys(_OF_TEXTS, _OF_TEXTS),
    "services.frontend.http.bodies.worker": _OF_BODIES,
    "tests.support.faulty_body_worker": _OF_BODIES,
}
"""The modules of each helper's fork server, whose memory counts against the helper's limit."""


@contextlib.contextmanager
def helpers_forked() -> Iterator[None]:
    """Forks the helpers that this process starts, for the length of the block."""
    start = asyncio.create_subprocess_exec
    prefix = child_command("")[:-1]

    async def fork_or_start(*command, **options):
        program = list(command[len(prefix) :])
        if list(command[: len(prefix)]) != prefix or program[0] not in SERVERS:
            return await start(*command, **options)
        return await _fork(program, **options)

    asyncio.create_subprocess_exec = fork_or_start
    try:
        yield
    finally:
        asyncio.create_subprocess_exec = start


async def _fork(
    program: Sequence[str], *, stdin: int, stdout: int, stderr: int, env: Mapping[str, str],
    pass_fds: Sequence[int], start_new_session: bool,
) -> ForkedProcess:  # fmt: skip
    assert (stdin, stdout, stderr) == (PIPE, PIPE, DEVNULL)
    assert start_new_session
    (their_input, our_output), (our_input, their_output) = os.pipe(), os.pipe()
    server = fork_server(*SERVERS[program[0]])
    with Path(os.devnull).open("rb+") as nothing:  # noqa: ASYNC230  never waits
        descriptors = {0: their_input, 1: their_output, 2: nothing.fileno()}
        descriptors |= {fd: fd for fd in pass_fds}
        report = fork(server, program, environment=env, descriptors=descriptors, group=0)
    os.close(their_input)
    os.close(their_output)
    loop = asyncio.get_running_loop()
    answers = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(our_input, "rb")
    )
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(our_output, "wb")
    )
    ended, writer = await asyncio.open_unix_connection(sock=report)
    process = ForkedProcess(int(await ended.readline()), ended, writer)
    process.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
    process.stdout = answers
    return process
