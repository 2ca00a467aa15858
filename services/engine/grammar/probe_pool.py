"""Processes that test whether a grammar compiles, within limits of time and memory."""

import json
from typing import Any

import structlog

from services.engine.errors import InvalidRequestError, QueueFullError, UnsupportedError
from services.engine.grammar.constraint import FIELD
from services.engine.structured_output import StructuredOutput
from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperOpeningError,
    HelperRefusalError,
    HelperUnavailableError,
)
from services.processes.helper_pool import HelperPool

log = structlog.get_logger()

NUM_PROBES = 2
START_TIMEOUT_S = 60.0
"""Longest time until a process has started and read the tokenizer."""
WAIT_S = 60.0
"""Longest time that a grammar waits for a process."""
MAX_ANSWER_BYTES = 2**26
"""Largest text of a grammar; those of JSON Schemas are longer than the schema."""
RETRY_AFTER_MS = 1000


class ProbePool:
    """Up to NUM_PROBES processes, each compiling one grammar at a time.

    No limit of the library bounds every grammar's time or memory ("multipleOf" a large prime takes
    minutes). A slow process can be killed, unlike a thread.
    """

    def __init__(self, settings: dict[str, Any], *, timeout_s: float) -> None:
        """Starts no process before the first grammar.

        Args:
            settings: arguments of `make_tokenizer`.
            timeout_s: time limit of one grammar.
        """
        self._timeout_s = timeout_s
        self._pool = HelperPool(
            "services.engine.grammar.probe",
            json.dumps(settings).encode(),
            num_processes=NUM_PROBES,
            start_timeout_s=START_TIMEOUT_S,
            environment={"RAYON_NUM_THREADS": "1"},
        )

    async def check(self, wanted: StructuredOutput) -> str:
        """Compiles an output's grammar and returns its text.

        If the caller leaves, the process continues to the end, the time limit or `close`.

        Raises:
            InvalidRequestError: it is wrong, takes too long or too much memory.
            UnsupportedError: the model's tokenizer allows no grammars.
            QueueFullError: no process can be started, or all are busy.
        """
        assert wanted.kind is not None, "an output without a form has no grammar"
        question = json.dumps(
            {"kind": wanted.kind.value, "texts": wanted.texts, "preamble": wanted.preamble}
        ).encode()
        try:
            grammar = await self._pool.ask(
                question,
                timeout_s=self._timeout_s,
                wait_s=WAIT_S,
                max_answer_bytes=MAX_ANSWER_BYTES,
            )
        except HelperRefusalError as error:
            raise InvalidRequestError(str(error), field=FIELD) from None
        except HelperBrokenError as error:
            raise InvalidRequestError(
                f"the grammar takes too much time or memory: compiling it {error}",
                field=FIELD,
            ) from None
        except HelperOpeningError as error:
            log.warning("grammar_probe_failed", reason=str(error))
            raise UnsupportedError(
                f"structured output is not supported here: {error}", field=FIELD
            ) from None
        except (HelperUnavailableError, HelperBusyError) as error:
            raise QueueFullError(
                f"the process that compiles grammars {error}", retry_after_ms=RETRY_AFTER_MS
            ) from None
        return grammar.decode()

    async def close(self) -> None:
        """Ends the processes, after the grammars whose callers wait."""
        await self._pool.close()
