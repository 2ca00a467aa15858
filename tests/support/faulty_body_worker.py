"""Stands in for the process that reads large bodies, and fails at one: `-m ... faulty_body_worker`.

A body that holds "die" makes it crash, one that holds "hang" is never answered.
"""

import os
import signal

from services.frontend.http.bodies import worker as body_worker
from services.processes.helper_program import run_helper


def open_worker(opening):
    read = body_worker.open_worker(opening)

    def fail(question):
        if b'"die"' in question:
            os.kill(os.getpid(), signal.SIGABRT)
        if b'"hang"' in question:
            signal.pause()
        return read(question)

    return fail


if __name__ == "__main__":
    run_helper(open_worker)
