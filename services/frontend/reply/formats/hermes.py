"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: NousResearch/Hermes-Function-Calling, README; the chat templates of Qwen2.5 and Qwen3.
"""

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class HermesReader(ReplyReader):
    """Reads calls as JSON objects between tags."""

    special_tokens = (OPENING, CLOSING)
    call_markers = (OPENING,)
    call_form = CallForm(
        f'{OPENING}\n{{"name": "NAME", "arguments": ',
        f"}}\n{CLOSING}",
        separator="\n",
        trigger=OPENING,
    )

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(OPENING)) is not None:
            yield from self._try_call(
                self._read_call(), opening=OPENING, closing=(CLOSING,), following=(OPENING,)
            )

    def _read_call(self) -> Wait:
        yield from self._read_call_object()
        while (yield from self._text.accept(CLOSING)) is None:
            yield from self._text.skip_any("}")  # one brace too many
            yield from self._read_call_object()
