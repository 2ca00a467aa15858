"""An engine whose worker crashes in the step in which a prompt begins that starts with DEADLY.

python -m tests.support.mortal_engine takes the flags of services.engine. Its workers are this
program too.
"""

import os
import signal
import sys
from dataclasses import dataclass
from typing import NoReturn

from services.engine import __main__ as engine
from services.engine.worker import executor

DEADLY = 999


def main() -> int:
    """Runs the engine or, when an engine started this, its worker."""
    if "--socket-fd" in sys.argv:
        return _run_worker()
    executor.WORKER_MODULE = "tests.support.mortal_engine"
    return engine.main()


def _run_worker() -> int:
    from services.engine.batch import BatchDescriptor, pack_int32
    from services.engine.worker import __main__ as worker
    from services.engine.worker import process

    deadly = pack_int32([DEADLY])

    @dataclass(frozen=True)
    class MortalRunner:
        immortal: process.Runner

        def execute(self, descriptor: BatchDescriptor) -> process.Pending:
            if any(row.token_ids.startswith(deadly) for row in descriptor.row_assignments):
                os.kill(os.getpid(), signal.SIGSEGV)
            return self.immortal.execute(descriptor)

    class MortalServer(process.StepServer):
        def serve(self, runner, ready, capture=None) -> NoReturn:
            super().serve(MortalRunner(runner), ready, capture)

    process.StepServer = MortalServer
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
