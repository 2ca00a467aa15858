"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, later `[TOOL_CALLS]name[ARGS]{...}`.

Source: mistral-common, tokens/tokenizers/instruct.py (versions 3 and 11).
"""

import secrets
import string

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import Wait
from services.frontend.reply.reply_reader import ReplyReader

OPENING = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_CHARACTERS = string.ascii_letters + string.digits


class MistralReader(ReplyReader):
    """Reads calls after a marker: as a JSON list, or each after a marker of its own."""

    special_tokens = (OPENING, ARGUMENTS, CALL_ID, "[THINK]", "[/THINK]")
    call_markers = (OPENING,)
    think = ("[THINK]", "[/THINK]")
    call_form = CallForm(
        '{"name": "NAME", "arguments": ',
        "}",
        begin=f"{OPENING} [",
        separator=", ",
        end="]",
        trigger=OPENING,
    )

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(OPENING)) is not None:
            yield from self._text.skip_space()
            is_list = yield from self._text.starts_with("[")
            calls = self._read_list() if is_list else self._read_call()
            yield from self._try_call(calls, opening=OPENING, following=(OPENING,))

    def _read_list(self) -> Wait:
        yield from self._text.expect("[")
        while (yield from self._text.accept("]")) is None:
            yield from self._read_call_object()
            yield from self._text.skip_any("},")

    def _read_call(self) -> Wait:
        self._start_call((yield from self._text.word()))
        if (yield from self._text.accept(ARGUMENTS, CALL_ID)) == CALL_ID:
            yield from self._text.text_until(ARGUMENTS)
        yield from self._text.skip_space()
        if not (yield from self._text.starts_with(OPENING)):
            yield from self._read_arguments()
            yield from self._text.skip_any("}")  # one brace too many

    def _new_call_id(self) -> str:
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))


class MistralV11Reader(MistralReader):
    """Reads the same; models of this version write each call after a marker of its own."""

    call_form = CallForm(f"{OPENING}NAME{ARGUMENTS}", "", trigger=OPENING)
