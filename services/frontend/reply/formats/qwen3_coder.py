"""Qwen3-Coder: `<function=name>` with `<parameter=key>` for each argument, in `<tool_call>`.

Source: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and Qwen3.5.
"""

from typing import ClassVar

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.formats.hermes import CLOSING, OPENING
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderReader(ReplyReader):
    """Reads calls whose arguments are tagged; each argument is passed on when it is complete."""

    opening: ClassVar[str] = OPENING
    closing: ClassVar[str] = CLOSING
    call_form = CallForm(
        f"{OPENING}\n{FUNCTION}NAME>\n",
        f"{FUNCTION_END}\n{CLOSING}",
        separator="\n",
        trigger=OPENING,
        pairs=ArgumentPairs(
            begin=PARAMETER, assign=">\n", end=f"\n{PARAMETER_END}\n", bare_strings=True
        ),
    )
    call_markers = (OPENING,)
    special_tokens = (OPENING, CLOSING)

    def _read_reply(self) -> Wait:
        opening, closing = self.opening, self.closing
        while (yield from self._read_content(opening)) is not None:
            yield from self._try_call(
                self._read_call(), opening=opening, closing=(closing,), following=(opening,)
            )

    def _read_call(self) -> Wait:
        yield from self._read_function()
        while (yield from self._text.accept(self.closing)) is None:
            yield from self._read_function()

    def _read_function(self) -> Wait:
        yield from self._text.expect(FUNCTION)
        name = yield from self._text.word()
        yield from self._text.expect(">")
        self._start_call(name)
        yield from self._read_pairs(name, closing=FUNCTION_END)
