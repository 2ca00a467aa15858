"""An engine whose worker crashes or stops by itself, at a step that the test has chosen.

python -m tests.support.steered_engine takes the flags of services.engine and --stop-file. Its
workers are this program too. They crash in the step in which a prompt begins that starts with
DEADLY, and stop, as of SIGSTOP, before the step that `stop_after` says; tests.support.pace waits
for one that has stopped and lets it go on.
"""

import argparse
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import structlog

from services.engine import __main__ as engine
from services.engine.core.engine_core import EngineCore
from services.engine.scheduler import holdings
from services.engine.worker import executor, rank_process
from tests.support.waiting import until

MODULE = "tests.support.steered_engine"
DEADLY = 999
WATCHED = "watch_began"
"""Log event of an engine whose steps a client begins to watch."""
WORKER_STACK = b"services/engine/worker/process.py"
"""Part of the stacks that a worker shows."""
LEAST_PUSHBACK_MS = 2000
"""So that a client's few attempts last longer than a busy machine holds a test up."""
_STOP_FILE = "STEERED_ENGINE_STOP_FILE"


def stop_after(stop_file: Path, num_tokens: int) -> None:
    """Stops the first worker, of all that share the file, that outputs more than `num_tokens`.

    It stops once, between two steps of a request that has at least these tokens; -100 are those of
    a prompt with 100 tokens to go. With 0, the first worker that is started stops before it is
    ready.
    """
    written = stop_file.with_suffix(".new")
    written.write_text(str(num_tokens))
    written.rename(stop_file)


def main() -> int:
    """Runs the engine or, when an engine started this, its worker."""
    if "--socket-fd" in sys.argv:
        return _run_worker()
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--stop-file", default="absent")
    arguments, sys.argv[1:] = parser.parse_known_args()
    os.environ[_STOP_FILE] = arguments.stop_file
    rank_process.WORKER_MODULE = MODULE
    executor.WorkerExecutor.show_stacks = _show_stacks
    holdings._MIN_RETRY_MS = LEAST_PUSHBACK_MS
    _announce_watchers()
    return engine.main()


async def _show_stacks(workers: executor.WorkerExecutor) -> None:
    """Waits for stacks instead of a time in which a busy machine may not let workers show them."""
    num_before = _num_stacks_in_log()
    for each in workers._ranks:
        each.show_stacks()
    with contextlib.suppress(TimeoutError):
        await until(lambda: _num_stacks_in_log() > num_before, pause_s=0.05)


def _num_stacks_in_log() -> int:
    return Path("/proc/self/fd/2").read_bytes().count(WORKER_STACK)


def _announce_watchers() -> None:
    watch = EngineCore.watch

    def announced(self, **wishes):
        watcher = watch(self, **wishes)
        structlog.get_logger().info(WATCHED)
        return watcher

    EngineCore.watch = announced


def _run_worker() -> int:
    from services.engine.batch import BatchDescriptor, pack_int32, read_int32
    from services.engine.worker import __main__ as worker
    from services.engine.worker import process

    deadly = pack_int32([DEADLY])
    stop_file = Path(os.environ[_STOP_FILE])

    @dataclass(frozen=True)
    class SteeredRunner:
        runner: process.Runner
        prompts: dict[int, int] = field(default_factory=dict)
        """Length of each row's prompt."""

        adapters = None

        def execute(self, descriptor: BatchDescriptor) -> process.Pending:
            if any(row.token_ids.startswith(deadly) for row in descriptor.row_assignments):
                os.kill(os.getpid(), signal.SIGSEGV)
            self.prompts.update((a.row, a.num_prompt_tokens) for a in descriptor.row_assignments)
            if self.is_to_stop(descriptor):
                os.kill(os.getpid(), signal.SIGSTOP)
            return self.runner.execute(descriptor)

        def most_output(self, descriptor: BatchDescriptor) -> int:
            attention = descriptor.attn_metadata
            rows, lengths = read_int32(attention.row_ids), read_int32(attention.seq_lens)
            return max(n - self.prompts[row] for row, n in zip(rows, lengths, strict=True))

        def is_to_stop(self, descriptor: BatchDescriptor) -> bool:
            try:
                is_here = self.most_output(descriptor) >= int(stop_file.read_text())
                if is_here:
                    stop_file.unlink()
            except FileNotFoundError:  # no worker is to stop, or another one was first
                return False
            return is_here

    class SteeredServer(process.StepServer):
        def serve(self, runner, ready, capture=None, sleeper=None) -> NoReturn:
            if stop_file.is_file() and int(stop_file.read_text()) == 0:
                stop_file.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            super().serve(SteeredRunner(runner), ready, capture, sleeper)

    process.StepServer = SteeredServer
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
