"""An engine whose worker halts when a request has the output that its seed says.

python -m tests.support.halting_engine takes the flags of services.engine. Its workers are this
program too. tests.support.pace waits for one that has halted and lets it go on.
"""

import signal
import sys
from typing import NoReturn

import structlog

from services.engine import __main__ as engine
from services.engine.core.engine_core import EngineCore
from services.engine.worker import executor

WATCHED = "watch_began"
"""What the engine logs when somebody begins to watch its steps."""
_MARK, _MOST_TOKENS = 31_415, 10_000


def halting_seed(num_tokens: int) -> int:
    """Seed of a request that halts the worker, once, in the step behind so many output tokens."""
    return _MARK * _MOST_TOKENS + num_tokens


def main() -> int:
    """Runs the engine or, when an engine started this, its worker."""
    if "--socket-fd" in sys.argv:
        return _run_worker()
    executor.WORKER_MODULE = "tests.support.halting_engine"
    watch = EngineCore.watch

    def announced(self, **wishes):
        watcher = watch(self, **wishes)
        structlog.get_logger().info(WATCHED)
        return watcher

    EngineCore.watch = announced
    return engine.main()


def _run_worker() -> int:
    from services.engine.batch import BatchDescriptor, read_int32
    from services.engine.worker import __main__ as worker
    from services.engine.worker import process

    class HaltingRunner:
        def __init__(self, runner: process.Runner) -> None:
            self._runner = runner
            self._lengths: dict[int, int] = {}
            """Tokens of a row's sequence at which to halt."""

        def execute(self, descriptor: BatchDescriptor) -> process.Pending:
            for taken in descriptor.row_assignments:
                self._lengths.pop(taken.row, None)
                mark, num_tokens = divmod(taken.sampling.seed, _MOST_TOKENS)
                length = taken.num_prompt_tokens + num_tokens
                # What was preempted behind that point has halted before.
                if mark == _MARK and len(read_int32(taken.token_ids)) < length:
                    self._lengths[taken.row] = length
            attention = descriptor.attn_metadata
            rows, lengths = read_int32(attention.row_ids), read_int32(attention.seq_lens)
            reached = dict(zip(rows.tolist(), lengths.tolist(), strict=True))
            due = [row for row, length in self._lengths.items() if reached.get(row, 0) >= length]
            for row in due:
                del self._lengths[row]
            if due:
                signal.raise_signal(signal.SIGSTOP)
            return self._runner.execute(descriptor)

    class HaltingServer(process.StepServer):
        def serve(self, runner, ready, capture=None) -> NoReturn:
            super().serve(HaltingRunner(runner), ready, capture)

    process.StepServer = HaltingServer
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
