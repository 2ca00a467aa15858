"""Runs a chat template in a process with a time limit.

A thread is not enough: 9**9**9 in a template holds Python's lock, and threads cannot be killed.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.text.chat_template import Message
from services.frontend.text.content_marks import MAX_GROWTH
from services.frontend.text.prompt_end import PromptEnd
from services.frontend.text.template_source import TemplateRefusedError, TemplateSource
from services.frontend.text.tokenizer import TokenizerFilesError
from services.processes.errors import (
    HelperBrokenError,
    HelperBusyError,
    HelperOpeningError,
    HelperRefusalError,
    HelperUnavailableError,
)
from services.processes.helper_pool import HelperPool
from services.transport.fair_turns import FairTurns

START_TIMEOUT_S = 10.0
"""Time limit for a new process to compile its template, generous for busy machines."""
MAX_WAITS = 5
"""Longest wait for a turn, in time limits: those of other accounts may all be used up."""
RETRY_AFTER_MS = 1000
_WORKER = "services.frontend.text.template_worker"

log = structlog.get_logger()


class TemplateProcess:
    """One model's chat template. It renders one conversation at a time, in about 0.5 ms.

    Accounts take turns. Exceeding the limit kills the process; the next conversation starts
    another.
    """

    def __init__(
        self,
        source: TemplateSource,
        *,
        timeout_s: float,
        is_strict: bool = True,
        writes_tools: bool = False,
    ) -> None:
        """Starts nothing yet; for `is_strict` and `writes_tools` see `ChatTemplate`."""
        opening = json.dumps(
            source.opening(is_strict=is_strict, writes_tools=writes_tools)
        ).encode()
        self._pool = HelperPool(_WORKER, opening, start_timeout_s=START_TIMEOUT_S)
        self._turns = FairTurns(1)
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Starts the process and compiles the template.

        Raises:
            TemplateRefusedError: the template is invalid.
            TokenizerFilesError: it takes too long to compile; `render` retries.
        """
        try:
            await self._pool.start()
        except HelperOpeningError as error:
            raise TemplateRefusedError(str(error)) from None
        except HelperUnavailableError as error:
            raise TokenizerFilesError(f"the chat template's process {error}") from None

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] | None = None,
        reasons: bool | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
        max_bytes: int,
        marks_content: bool = False,
        account: str = "",
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        `reasons` turns the reasoning on or off in a template that has a variable for it; `end` is
        where the prompt ends. With `marks_content`, caller text is marked, for `MarkedText.read`.
        An `account` takes turns with others.

        Raises:
            InvalidRequestError: the template refuses the conversation, fails, takes too long, or
                renders over `max_bytes`.
            OverloadedError: the wait was too long.
            EngineUnavailableError: no process can be started, or the template was closed and may
                have been replaced.
        """
        question = {
            "messages": list(messages),
            "tools": list(tools),
            "variables": dict(variables or {}),
            "reasons": reasons,
            "end": end,
            "max_bytes": max_bytes,
            "marks_content": marks_content,
            # The process has no environment and thus no time zone.
            "now": datetime.datetime.now().isoformat(),
        }
        ask = partial(
            self._pool.ask,
            json.dumps(question).encode(),
            timeout_s=self._timeout_s,
            wait_s=self._timeout_s,
            max_answer_bytes=MAX_GROWTH * max_bytes + 3,  # and the mark itself
        )
        try:
            prompt = await self._turns.run(account, ask, wait_s=MAX_WAITS * self._timeout_s)
        except HelperRefusalError as error:
            raise InvalidRequestError(str(error)) from None
        except HelperBrokenError as error:
            log.warning("template_stopped", reason=str(error))
            raise InvalidRequestError(f"the chat template {error}") from None
        except (TimeoutError, HelperBusyError):
            raise OverloadedError(
                "the chat template is busy with other conversations", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except (HelperUnavailableError, HelperOpeningError) as error:
            raise EngineUnavailableError(
                f"the chat template's process {error}; try again", retry_after_ms=RETRY_AFTER_MS
            ) from None
        return prompt.decode()

    async def close(self) -> None:
        """Ends the process after the current conversation."""
        await self._pool.close()
