"""Stands in for the process that reads large bodies, and fails at one: `-m ... faulty_body_worker`.

A body that holds "die" ends it, one that holds "hang" is never answered.
"""

import os
import signal

from services.frontend.http import body_worker

_answer = body_worker._answer


def _fail(task, body):
    if b'"die"' in body:
        os.kill(os.getpid(), signal.SIGKILL)
    if b'"hang"' in body:
        signal.pause()
    return _answer(task, body)


if __name__ == "__main__":
    body_worker._answer = _fail
    body_worker.main()
