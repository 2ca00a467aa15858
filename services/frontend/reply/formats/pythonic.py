"""Llama 3.2 and 4, and others: `[name(key="value", other=1), name()]` as the whole reply.

Source: Llama 3.2 model card and prompt formats, "zero shot function calling".
"""

import json
import re

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import UnexpectedTextError, Wait
from services.frontend.reply.python_values import json_of_python
from services.frontend.reply.reply_reader import ReplyReader

START, END = "<|python_start|>", "<|python_end|>"
# Grammars write names with characters that Python does not count as those of words.
_KEYWORD = re.compile(r"""\s*([^\s=,()\[\]{}"']+)\s*=(?!=)(.*)""", re.DOTALL)


class PythonicReader(ReplyReader):
    """Reads a reply that is a list of calls as Python writes them."""

    special_tokens = (START, END)
    call_markers = (START,)
    call_form = CallForm(
        "NAME(",
        ")",
        begin="[",
        separator=", ",
        end="]",
        pairs=ArgumentPairs(assign="=", separator=", ", python_names=True),
    )

    def _read_reply(self) -> Wait:
        if not self._has_content:  # a list of calls is the whole reply
            tag = yield from self._text.accept(START)
            if (yield from self._text.starts_with("[")):
                yield from self._try_call(self._read_calls(), opening=tag or "")
                yield from self._text.accept(END)
        yield from self._text.until(emit=self._emit_content)

    def _read_calls(self) -> Wait:
        yield from self._text.expect("[")
        while True:
            name = yield from self._text.word()
            yield from self._text.expect("(")
            if not self._num_calls and name not in self._tools:
                raise UnexpectedTextError  # a list that is an answer
            self._start_call(name)
            yield from self._read_members(name)
            if (yield from self._text.accept(",", "]")) != ",":
                return
            if (yield from self._text.accept("]")) is not None:
                return

    def _read_members(self, name: str) -> Wait:
        """Reads arguments; those without a name get the properties' names, in their order."""
        free = list(self._schemas_of(name).by_name)
        assignments = [f"{each}=" for each in sorted(free, key=len, reverse=True)]
        opening, number = "{", 0
        end = yield from self._text.accept(")")
        while end != ")":
            number += 1
            known = yield from self._text.accept(*assignments)
            pieces: list[str] = []
            yield from self._text.python_value(pieces.append)
            value = "".join(pieces)
            if known is not None:
                key = known.removesuffix("=")
            elif keyword := _KEYWORD.match(value):
                key, value = keyword.groups()
            else:
                key = free[0] if free else f"arg{number}"
            free = [each for each in free if each != key]
            name_text = json.dumps(key, ensure_ascii=False)
            self._emit_arguments(f"{opening}{name_text}: {json_of_python(value)}")
            opening = ", "
            end = yield from self._text.expect(",", ")")
            if end == ",":
                end = yield from self._text.accept(")")
        self._emit_arguments("{}" if opening == "{" else "}")
        self._end_call()
