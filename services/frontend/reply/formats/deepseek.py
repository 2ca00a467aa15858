"""DeepSeek: calls between special tokens, in the form of V3 and R1 and in that of V3.1.

Source: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.
"""

from typing import ClassVar

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

CALLS, CALLS_END = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class DeepseekV31Reader(ReplyReader):
    """Reads calls of the form `name<sep>{...}`."""

    special_tokens = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
    closing: ClassVar[tuple[str, ...]] = (CALL_END,)
    call_markers = (CALLS, CALL)
    call_form = CallForm(
        f"{CALL}NAME{SEPARATOR}", CALL_END, begin=CALLS, end=CALLS_END, trigger=CALLS
    )

    def _read_reply(self) -> Wait:
        while (marker := (yield from self._read_content(*self.special_tokens))) is not None:
            if marker == CALL:
                yield from self._try_call(
                    self._read_call(),
                    opening=CALL,
                    closing=self.closing,
                    following=(CALL, CALLS_END),
                )

    def _read_call(self) -> Wait:
        self._start_call((yield from self._text.text_until(SEPARATOR)))
        yield from self._read_arguments()
        yield from self._text.expect(CALL_END)


class DeepseekV3Reader(DeepseekV31Reader):
    """Reads calls of the form `function<sep>name` with the arguments in a block of code."""

    closing = (f"\n```{CALL_END}", CALL_END)
    call_form = CallForm(
        f"{CALL}function{SEPARATOR}NAME\n```json\n",
        f"\n```{CALL_END}",
        begin=CALLS,
        separator="\n",
        end=CALLS_END,
        trigger=CALLS,
    )

    def _read_call(self) -> Wait:
        yield from self._text.text_until(SEPARATOR)
        self._start_call((yield from self._text.text_until("\n")))
        yield from self._text.accept("```json")
        yield from self._read_arguments()
        yield from self._text.accept("```")
        yield from self._text.expect(CALL_END)
