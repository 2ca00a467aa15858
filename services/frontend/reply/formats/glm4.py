"""GLM-4.5: `<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>`, `</tool_call>`.

Source: the chat template of zai-org/GLM-4.5.
"""

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm4Reader(ReplyReader):
    """Reads calls whose arguments are pairs of tags; each pair is passed on when it is complete."""

    call_form = CallForm(
        f"{OPENING}NAME",
        f"\n{CLOSING}",
        separator="\n",
        trigger=OPENING,
        pairs=ArgumentPairs(
            begin=f"\n{KEY}", assign=f"{KEY_END}\n{VALUE}", end=VALUE_END, bare_strings=True
        ),
    )
    call_markers = (OPENING,)
    special_tokens = (OPENING, CLOSING, KEY, KEY_END, VALUE, VALUE_END, "<think>", "</think>")

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(OPENING)) is not None:
            yield from self._try_call(
                self._read_call(), opening=OPENING, closing=(CLOSING,), following=(OPENING,)
            )

    def _read_call(self) -> Wait:
        name = yield from self._text.word()
        marker = yield from self._text.expect(KEY, CLOSING)
        self._start_call(name)
        self._text.put_back(marker)
        yield from self._read_pairs(name, closing=CLOSING)
