"""Reads bodies: small ones on the event loop, others in a process of their own."""

import asyncio
import json
import pickle
from functools import partial
from typing import Literal

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.http.body_worker import Refusal, question_of
from services.frontend.http.calls import Call, ReadCall, read_chat, read_completion
from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperError,
)
from services.processes.helper_pool import HelperPool
from services.telemetry.counts import Counts

Reader = Literal["completion", "chat"]

INLINE_BODY_BYTES = 2**20
"""Larger bodies are always read in the process: bytes alone take 5 ns each."""
INLINE_MARKS = 4096
"""Bodies with more marks of structure are read in the process: one may take 4 us on its own."""
MAX_WAITING_BYTES = 128 * 2**20
"""Bytes of all large bodies that are being read or wait; 15 MiB take up to 0.6 s of CPU."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest call as it comes back; its prompt and options are within their own limits."""
READ_TIMEOUT_S = 10.0
"""Longest time for one body in the process; the worst one takes 0.6 s of CPU."""
WAIT_S = 60.0
"""Longest time that a body waits for the process."""
START_TIMEOUT_S = 30.0
"""Longest time until a new process is ready; busy machines are slow at it."""
RETRY_AFTER_MS = 1000
_MARKS = b"{[,:\\"
"""A body has at most as many values and keys as these; a backslash may hide one in a string."""
_WAITING = "large_body_bytes"
_WORKER = "services.frontend.http.body_worker"
_READERS: dict[Reader, ReadCall] = {"completion": read_completion, "chat": read_chat}


def is_small(body: bytes) -> bool:
    """Whether a body is read on the event loop: its values are few, whatever they are."""
    if len(body) > INLINE_BODY_BYTES:
        return False
    return len(body) - len(body.translate(None, delete=_MARKS)) <= INLINE_MARKS


class BodyReader:
    """Makes calls of bodies.

    Parsing and checking JSON holds the interpreter's lock, for seconds where a body has millions of
    values or errors. A process does both, one body at a time; what comes back is within the limits.
    It starts with the first large body, and again after it was lost.
    """

    def __init__(self, *, max_prompt_bytes: int, max_samples: int, counts: Counts) -> None:
        """Starts nothing yet.

        Args:
            max_prompt_bytes: longest prompt or conversation.
            max_samples: most outputs that one request may have.
            counts: holds the bytes of bodies that wait.
        """
        self._counts = counts
        limits = {"max_prompt_bytes": max_prompt_bytes, "max_samples": max_samples}
        self._pool = HelperPool(
            _WORKER,
            json.dumps(limits).encode(),
            start_timeout_s=START_TIMEOUT_S,
            environment={"OPENBLAS_NUM_THREADS": "1"},
        )

    async def read(
        self, reader: Reader, body: bytes, request_id: str, *, max_prompt_tokens: int
    ) -> Call:
        """Returns the call that a body is.

        Args:
            reader: what reads it.
            body: the body.
            request_id: names the request.
            max_prompt_tokens: token ids of a prompt from which on it is refused.

        Raises:
            InvalidRequestError: it cannot be served as it is, or takes too much to read.
            OverloadedError: too many large bodies wait.
            EngineUnavailableError: the process that reads large bodies cannot be used now.
        """
        if is_small(body):
            return _READERS[reader](body, request_id)
        if not self._counts.take(_WAITING, len(body), limit=MAX_WAITING_BYTES):
            raise OverloadedError(
                f"{self._counts.held(_WAITING)} bytes of large bodies wait to be read;"
                f" the limit is {MAX_WAITING_BYTES}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        question = question_of(reader, request_id, max_prompt_tokens, body)
        # A caller that goes away leaves its body in the process's queue.
        asking = asyncio.create_task(self._ask(question))
        asking.add_done_callback(partial(self._end_asking, len(body)))
        answer = await asyncio.shield(asking)
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, field=answer.field)
        return answer

    async def close(self) -> None:
        """Ends the process, after the body it is at."""
        await self._pool.close()

    def _end_asking(self, num_bytes: int, asking: "asyncio.Task[Call | Refusal]") -> None:
        self._counts.give_back(_WAITING, num_bytes)
        if not asking.cancelled():
            asking.exception()  # its caller may be gone

    async def _ask(self, question: bytes) -> Call | Refusal:
        try:
            answer: Call | Refusal = pickle.loads(
                await self._pool.ask(
                    question,
                    timeout_s=READ_TIMEOUT_S,
                    wait_s=WAIT_S,
                    max_answer_bytes=MAX_ANSWER_BYTES,
                )
            )
        except HelperBrokenError as error:
            raise InvalidRequestError(
                f"the body takes too much to read: reading it {error}"
            ) from None
        except HelperBusyError as error:
            raise OverloadedError(
                f"the process that reads large bodies {error}", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except HelperError as error:
            raise EngineUnavailableError(
                f"the body could not be read: the process for large bodies {error}",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None
        return answer
