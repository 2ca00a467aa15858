"""Encodes and decodes long texts in a process, whose memory goes back to the system.

The library takes up to 400 bytes for each byte of text, and cannot be stopped.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.text.encoder import Encoding
from services.frontend.text.library_errors import EncodingError, TooManyTokensError
from services.frontend.text.tokenizer_worker import (
    OPENING,
    Decoding,
    read_ids,
)
from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperError,
    HelperRefusalError,
)
from services.processes.helper_pool import HelperPool
from services.transport.fair_turns import FairTurns

START_TIMEOUT_S = 60.0
"""Time limit for a new process to read the tokenizer, generous for busy machines."""
MEBIBYTE_TIMEOUT_S = 120.0
"""Time limit for a text, and again for each MiB of it; a bad one takes 20 s on a busy core."""
RETRY_AFTER_MS = 1000
MAX_ANSWER_GROWTH = 64
"""Most bytes of an answer for one byte of a question, plus a MiB: a token's text may be long."""
BASE_MEMORY_BYTES = 512 * 2**20
MEMORY_PER_TEXT_BYTE = 512
MEMORY_PER_TOKENIZER_BYTE = 64
"""Memory that a process may take: in all cases, for its longest text, and for its tokenizer."""
_WORKER = "services.frontend.text.tokenizer_worker"


class TokenizerProcess:
    """One model's tokenizer in processes, whose queue is shared by accounts."""

    def __init__(self, content: bytes, *, num_processes: int, max_text_bytes: int) -> None:
        """Starts nothing before the first text; `content` is the tokenizer.json."""
        max_memory_bytes = (
            BASE_MEMORY_BYTES
            + MEMORY_PER_TEXT_BYTE * max_text_bytes
            + MEMORY_PER_TOKENIZER_BYTE * len(content)
        )
        self._pool = HelperPool(
            _WORKER,
            OPENING.pack(max_memory_bytes) + content,
            num_processes=num_processes,
            start_timeout_s=START_TIMEOUT_S,
            environment={"TOKENIZERS_PARALLELISM": "false"},
        )
        self._turns = FairTurns(num_processes)

    async def encode(
        self, wanted: Encoding, account: str, *, check: Callable[[], None] | None = None
    ) -> list[int]:
        """Encodes a text for an account.

        When its turn comes, `check` may refuse it by raising an error.

        Raises:
            EncodingError, TooManyTokensError: see `Encoder.encode`.
            InvalidRequestError: it takes too much time or memory.
            EngineUnavailableError: no process can be started.
        """
        answer = await self._ask(wanted, account, check)
        if isinstance(answer, int):
            raise TooManyTokensError(answer)
        return read_ids(answer)

    async def decode(self, token_ids: list[int], account: str, *, show_special_tokens: bool) -> str:
        """Decodes token ids for an account; see `Encoder.decode` and `encode`."""
        text = await self._ask(Decoding.of(token_ids, show_special_tokens), account)
        return str(text)

    async def close(self) -> None:
        """Ends the processes after the texts whose callers wait."""
        await self._pool.close()

    async def _ask(
        self,
        asked: Encoding | Decoding,
        account: str,
        check: Callable[[], None] | None = None,
    ) -> Any:
        try:
            return pickle.loads(
                await self._turns.run(account, partial(self._ask_now, asked, check))
            )
        except HelperRefusalError as error:
            raise EncodingError(str(error)) from None
        except HelperBrokenError as error:
            raise InvalidRequestError(
                f"the text takes too much to tokenize: tokenizing it {error}", field="prompt"
            ) from None
        except HelperBusyError as error:
            raise OverloadedError(
                f"the process that tokenizes long texts {error}", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except HelperError as error:
            raise EngineUnavailableError(
                f"the process that tokenizes long texts {error}; try again",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None

    async def _ask_now(self, asked: Encoding | Decoding, check: Callable[[], None] | None) -> bytes:
        if check is not None:
            check()
        question = pickle.dumps(asked, pickle.HIGHEST_PROTOCOL)
        timeout_s = MEBIBYTE_TIMEOUT_S * (1 + len(question) / 2**20)
        return await self._pool.ask(
            question,
            timeout_s=timeout_s,
            wait_s=timeout_s,
            max_answer_bytes=MAX_ANSWER_GROWTH * len(question) + 2**20,
        )
