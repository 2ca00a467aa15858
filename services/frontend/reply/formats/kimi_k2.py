"""Kimi K2: calls between special tokens, each with a name of its own such as `functions.add:0`.

Source: the chat templates of moonshotai/Kimi-K2-Instruct and Kimi-K2-Thinking.
"""

import re

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader, Tools

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_FUNCTIONS = "functions."
_INDEX = re.compile(r":\d+\Z")
_ID = re.compile(r"[\w.-]{1,128}:\d{1,9}")


class KimiK2Reader(ReplyReader):
    """Reads calls whose ids are the model's, as the chat template repeats them in its form."""

    special_tokens = (CALLS, CALLS_END, CALL, CALL_END, ARGUMENTS)
    call_markers = (CALLS, CALL)
    call_form = CallForm(
        f"{CALL}{_FUNCTIONS}NAME:0{ARGUMENTS}",
        CALL_END,
        begin=CALLS,
        end=CALLS_END,
        trigger=CALLS,
    )

    def __init__(
        self, tools: Tools, *, is_reasoning: bool = False, continues: bool = False
    ) -> None:
        """Starts a reply; see `ReplyReader`."""
        super().__init__(tools, is_reasoning=is_reasoning, continues=continues)
        self._written_id = ""
        self._given_ids: set[str] = set()

    def _read_reply(self) -> Wait:
        while (marker := (yield from self._read_content(*self.special_tokens))) is not None:
            if marker == CALL:
                yield from self._try_call(
                    self._read_call(),
                    opening=CALL,
                    closing=(CALL_END,),
                    following=(CALL, CALLS_END),
                )

    def _read_call(self) -> Wait:
        self._written_id = (yield from self._text.text_until(ARGUMENTS)).strip()
        self._start_call(_INDEX.sub("", self._written_id).removeprefix(_FUNCTIONS))
        yield from self._read_arguments()
        yield from self._text.expect(CALL_END)

    def _new_call_id(self) -> str:
        """Returns the model's id of a call, unless it is odd or another one of the reply has it."""
        written = self._written_id
        if not _ID.fullmatch(written) or written in self._given_ids:
            return super()._new_call_id()
        self._given_ids.add(written)
        return written
