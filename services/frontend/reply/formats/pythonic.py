"""Llama 3.2 and 4, and others: `[name(key="value", other=1), name()]` as the whole reply.

Source: Llama 3.2 model card and prompt formats, "zero shot function calling".
"""

import ast
import contextlib
import json
from collections.abc import Generator
from typing import Any

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import UnexpectedTextError, Wait
from services.frontend.reply.reply_reader import ReplyReader

START, END = "<|python_start|>", "<|python_end|>"


class PythonicReader(ReplyReader):
    """Reads a reply that is a list of calls as Python writes them."""

    special_tokens = (START, END)
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
                yield from self._try_call(self._read_calls(), closing="", opening=tag or "")
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
            yield from self._read_arguments()
            self._end_call()
            if (yield from self._text.accept(",", "]")) != ",":
                return

    def _read_arguments(self) -> Wait:
        opening = "{"
        while (yield from self._text.accept(")")) is None:
            key = (yield from self._text.text_until("=")).strip()
            value = yield from self._python_value()
            text = json.dumps(value, ensure_ascii=False)
            self._emit_arguments(f"{opening}{json.dumps(key)}: {text}")
            opening = ", "
            yield from self._text.accept(",")
        self._emit_arguments("{}" if opening == "{" else "}")

    def _python_value(self) -> Generator[None, None, Any]:
        pieces: list[str] = []
        yield from self._text.python_value(pieces.append)
        text = "".join(pieces).strip()
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)  # as grammars write values; Python lacks some of its escapes
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise UnexpectedTextError from None
