"""Runs a chat template where it can do no harm: in a process that is ended when it takes too long.

A thread would not do. A template can compute 9**9**9, which holds Python's lock and so the whole
frontend, and no thread can be ended.
"""

import datetime
import json
from collections.abc import Sequence

import structlog

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.text.chat_template import Message
from services.frontend.text.content_marks import MAX_GROWTH
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

START_TIMEOUT_S = 10.0
"""Longest time until a new process has compiled its template; busy machines are slow at it."""
RETRY_AFTER_MS = 1000
_WORKER = "services.frontend.text.template_worker"

log = structlog.get_logger()


class TemplateProcess:
    """One model's chat template. It renders one conversation at a time, in about half a ms.

    A conversation that takes longer than the limit costs the process, and the next one starts
    another. A conversation that waits for its turn longer than the limit is refused.
    """

    def __init__(self, source: TemplateSource, *, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            source: the template.
            timeout_s: longest time to wait for a turn, and to render.
        """
        opening = json.dumps(source.opening()).encode()
        self._pool = HelperPool(_WORKER, opening, start_timeout_s=START_TIMEOUT_S)
        self._timeout_s = timeout_s

    async def start(self) -> None:
        """Starts the process and compiles the template.

        Raises:
            TemplateRefusedError: the template is not valid.
            TokenizerFilesError: it takes too long to compile; `render` tries again.
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
        max_bytes: int,
        marks_content: bool = False,
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        With `marks_content` it has marks in what the caller wrote, for `MarkedText.read`.

        Raises:
            InvalidRequestError: the template refuses the conversation, fails on it, takes too long
                for it, or makes more than `max_bytes` of it.
            OverloadedError: other conversations took too long before.
            EngineUnavailableError: no process can be started now, or the template was closed and
                another one may have taken its place.
        """
        question = {
            "messages": list(messages),
            "tools": list(tools),
            "max_bytes": max_bytes,
            "marks_content": marks_content,
            # The process has no environment, so it does not know the time zone.
            "now": datetime.datetime.now().isoformat(),
        }
        try:
            prompt = await self._pool.ask(
                json.dumps(question).encode(),
                timeout_s=self._timeout_s,
                wait_s=self._timeout_s,
                max_answer_bytes=MAX_GROWTH * max_bytes + 3,  # and the mark itself
            )
        except HelperRefusalError as error:
            raise InvalidRequestError(str(error)) from None
        except HelperBrokenError as error:
            log.warning("template_stopped", reason=str(error))
            raise InvalidRequestError(f"the chat template {error}") from None
        except HelperBusyError:
            raise OverloadedError(
                "the chat template is busy with other conversations", retry_after_ms=RETRY_AFTER_MS
            ) from None
        except (HelperUnavailableError, HelperOpeningError) as error:
            raise EngineUnavailableError(
                f"the chat template's process {error}; try again", retry_after_ms=RETRY_AFTER_MS
            ) from None
        return prompt.decode()

    async def close(self) -> None:
        """Ends the process, after the conversation it is at."""
        await self._pool.close()
