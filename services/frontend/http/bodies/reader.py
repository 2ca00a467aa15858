"""Parses bodies: small ones on the event loop, others in a separate process."""

import pickle
from collections.abc import Sequence
from functools import partial

from services.frontend.errors import EngineUnavailableError, InvalidRequestError, OverloadedError
from services.frontend.http.bodies.call import AnyCall, Call, ReadCall
from services.frontend.http.bodies.worker import Refusal, question_of
from services.processes.errors import HelperBrokenError, HelperBusyError, HelperError
from services.processes.helper_pool import HelperPool
from services.transport.counts import Counts
from services.transport.fair_turns import FairTurns

INLINE_BODY_BYTES = 2**20
"""Larger bodies are always parsed in the process: scanning takes 5 ns per byte."""
INLINE_MARKS = 4096
"""Bodies with more structural marks are parsed in the process: one can take 4 us."""
MAX_WAITING_BYTES = 128 * 2**20
"""Bytes of all large bodies that wait or are parsed; 15 MiB take up to 0.6 s of CPU."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest parsed call; prompt and options have their own limits."""
_MEMORY_BYTES = 32 * 2**20
"""Longer bodies and calls go through pipes."""
READ_TIMEOUT_S = 10.0
"""Time limit for one body in the process; the worst takes 0.6 s of CPU."""
WAIT_S = 60.0
"""Time limit of the wait for the process."""
START_TIMEOUT_S = 30.0
"""Time limit for a new process to start, generous for busy machines."""
RETRY_AFTER_MS = 1000
_MARKS = b"{[,:\\"
"""Upper bound of values and keys; a backslash may hide one in a string."""
_WAITING = "large_body_bytes"
_WORKER = "services.frontend.http.bodies.worker"


def is_small(body: bytes) -> bool:
    """Whether a body has few enough values to be parsed on the event loop."""
    if len(body) > INLINE_BODY_BYTES:
        return False
    return len(body) - len(body.translate(None, delete=_MARKS)) <= INLINE_MARKS


class BodyReader:
    """Parses bodies into calls.

    Parsing JSON holds the interpreter's lock, for seconds with millions of values. A process parses
    large bodies one at a time; it starts with the first one, and again after a crash. Accounts take
    turns.
    """

    def __init__(
        self,
        parsers: Sequence[ReadCall[Call]],
        *,
        max_prompt_bytes: int,
        max_samples: int,
        counts: Counts,
        strict_fields: bool = False,
    ) -> None:
        """Starts nothing yet; `strict_fields` refuses fields that nothing here can follow.

        The process loads the modules of `parsers` when it starts, not with a body that waits.
        """
        self._counts = counts
        self._strict_fields = strict_fields
        limits = {
            "max_prompt_bytes": max_prompt_bytes,
            "max_samples": max_samples,
            "strict_fields": strict_fields,
        }
        self._turns = FairTurns(1)
        self._pool = HelperPool(
            _WORKER,
            pickle.dumps((tuple(parsers), limits), pickle.HIGHEST_PROTOCOL),
            start_timeout_s=START_TIMEOUT_S,
            environment={"OPENBLAS_NUM_THREADS": "1"},
            memory_bytes=_MEMORY_BYTES,
        )

    async def read(
        self,
        read: ReadCall[AnyCall],
        body: bytes,
        request_id: str,
        account: str,
        *,
        max_prompt_tokens: int,
    ) -> AnyCall:
        """Returns the call that `read`, a function of a module, finds in a body of an account.

        Raises:
            InvalidRequestError: it is invalid, or takes too much to parse.
            OverloadedError: too many large bodies wait.
            EngineUnavailableError: the process cannot be used now.
        """
        if is_small(body):
            return read(body, request_id, is_strict=self._strict_fields)
        if not self._counts.take(_WAITING, len(body), limit=MAX_WAITING_BYTES):
            raise OverloadedError(
                f"{self._counts.held(_WAITING)} bytes of large bodies wait to be read;"
                f" the limit is {MAX_WAITING_BYTES}",
                retry_after_ms=RETRY_AFTER_MS,
            )
        # The body of a caller that left stays in the process, if it is being read.
        ask = partial(self._ask, read, request_id, max_prompt_tokens, body)
        try:
            answer = await self._turns.run(account, ask, wait_s=WAIT_S)
        except TimeoutError:
            raise OverloadedError(
                "the process that reads large bodies is busy", retry_after_ms=RETRY_AFTER_MS
            ) from None
        finally:
            self._counts.give_back(_WAITING, len(body))
        if isinstance(answer, Refusal):
            raise InvalidRequestError(answer.message, field=answer.field, code=answer.code)
        return answer

    async def close(self) -> None:
        """Ends the process after the current body."""
        await self._pool.close()

    async def _ask(
        self, read: ReadCall[AnyCall], request_id: str, max_prompt_tokens: int, body: bytes
    ) -> AnyCall | Refusal:
        question = question_of(read, request_id, max_prompt_tokens, body)
        try:
            answer: AnyCall | Refusal = pickle.loads(
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
