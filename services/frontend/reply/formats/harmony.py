"""gpt-oss: harmony, whose messages have channels: analysis, commentary (with calls) and final.

Source: OpenAI cookbook, "OpenAI harmony response format".
"""

import re

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
BEGINNINGS = (START, CHANNEL)
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyReader(ReplyReader):
    """Reads messages by their channel and recipient: reasoning, calls and content."""

    special_tokens = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
    think = (f"{CHANNEL}analysis{MESSAGE}", ENDS[0])
    always_reasons = True
    # The token that ends a call ends the reply.
    call_form = CallForm(
        f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}", "", is_single=True
    )

    @classmethod
    def preamble(cls, *, is_call: bool) -> tuple[str, str]:
        """Returns the texts around the analysis, to where a call or the final answer begins."""
        answer = "" if is_call else f"{CHANNEL}final{MESSAGE}"
        return cls.think[0], f"{ENDS[0]}{START}assistant{answer}"

    def _read(self, *, is_reasoning: bool) -> Wait:
        if is_reasoning:
            yield from self._read_analysis()
        yield from self._read_reply()

    def _read_reply(self) -> Wait:
        while (marker := (yield from self._read_content(*BEGINNINGS, *ENDS))) is not None:
            if marker in BEGINNINGS:
                header: list[str] = []
                if (yield from self._text.until(MESSAGE, emit=header.append)) is not None:
                    yield from self._read_message("".join(header))

    def _read_message(self, header: str) -> Wait:
        recipient = RECIPIENT.search(header)
        if recipient is not None:
            call = self._read_call(recipient[1])
            yield from self._try_call(call, closing=ENDS, following=BEGINNINGS)
        elif "analysis" in header:
            yield from self._read_analysis()
        # The text of another channel is content up to the next marker.

    def _read_call(self, name: str) -> Wait:
        self._start_call(name)
        yield from self._read_arguments()
        yield from self._text.expect(*ENDS)

    def _read_analysis(self) -> Wait:
        """Passes reasoning on up to the end of its message, or to another one's beginning."""
        marker = yield from self._read_reasoning(*ENDS, *BEGINNINGS)
        if marker in BEGINNINGS:
            self._text.put_back(marker)
