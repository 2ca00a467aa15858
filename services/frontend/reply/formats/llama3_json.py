"""Llama 3.1 and later: `{"name": ..., "parameters": {...}}` as the whole reply, `;` between calls.

Source: Llama 3.1 model card and prompt formats, "JSON based tool calling".
"""

from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import UnexpectedTextError, Wait
from services.frontend.reply.reply_reader import ReplyReader

PYTHON_TAG = "<|python_tag|>"


class Llama3JsonReader(ReplyReader):
    """Reads a reply that begins as a JSON object with the name of a tool as calls."""

    special_tokens = (PYTHON_TAG,)
    call_markers = (PYTHON_TAG,)
    call_form = CallForm('{"name": "NAME", "parameters": ', "}", separator="; ")

    def _read_reply(self) -> Wait:
        tag, is_call = None, False
        if not self._has_content:  # a call is the whole reply
            tag = yield from self._text.accept(PYTHON_TAG)
            is_call = yield from self._text.starts_with("{")
        while is_call:
            num_calls = self._num_calls
            yield from self._try_call(self._read_call_object(), opening=tag or "")
            is_call = False
            if self._num_calls > num_calls:
                yield from self._text.skip_any("}")  # one brace too many
                is_call = bool((yield from self._text.accept(";")))
        yield from self._text.until(emit=self._emit_content)

    def _start_call(self, name: str) -> None:
        if not self._num_calls and name not in self._tools:
            raise UnexpectedTextError  # an answer in JSON that has a name
        super()._start_call(name)
