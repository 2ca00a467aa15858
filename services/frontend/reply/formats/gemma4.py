"""Gemma 4: `call:name{key:value}` between special tokens, with strings between `<|"|>`.

Source: the chat template of google/gemma-4-31b-it.
"""

import json
from collections.abc import Generator

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.bare_values import json_of
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.incoming_text import UnexpectedTextError, Wait
from services.frontend.reply.reply_reader import ReplyReader

OPENING, CLOSING = "<|tool_call>", "<tool_call|>"
QUOTE = '<|"|>'
MAX_DEPTH = 64
"""Levels of objects and lists in an argument."""
_PLAIN_KINDS = frozenset({"boolean", "null", "integer", "number", "string"})


class Gemma4Reader(ReplyReader):
    """Reads calls as JSON; each argument is passed on when it is complete."""

    think = ("<|channel>", "<channel|>")
    special_tokens = (OPENING, CLOSING, QUOTE)
    call_markers = (OPENING,)
    call_form = CallForm(
        f"{OPENING}call:NAME{{",
        f"}}{CLOSING}",
        trigger=OPENING,
        pairs=ArgumentPairs(assign=":", separator=",", quote=QUOTE),
    )

    def _read_reasoning(self, *closing: str) -> Generator[None, None, str | None]:
        """Passes reasoning on, without the name of its channel."""
        if not self._continues_reasoning:
            yield from self._text.accept("thought")
        return (yield from super()._read_reasoning(*closing))

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(OPENING)) is not None:
            yield from self._try_call(
                self._read_call(), opening=OPENING, closing=(CLOSING,), following=(OPENING,)
            )

    def _read_call(self) -> Wait:
        yield from self._text.expect("call:")
        name = yield from self._text.word()
        yield from self._text.expect("{")
        self._start_call(name)
        opening = "{"
        while (yield from self._text.accept("}")) is None:
            member = yield from self._member(MAX_DEPTH)
            self._emit_arguments(opening + member)
            opening = ", "
            yield from self._text.accept(",")
        self._emit_arguments("{}" if opening == "{" else "}")
        self._end_call()
        yield from self._text.expect(CLOSING)

    def _member(self, depth: int) -> Generator[None, None, str]:
        """Returns a key and its value as JSON."""
        if (yield from self._text.accept(QUOTE)) is None:
            key = yield from self._text.word()
        else:
            key = yield from self._text.text_until(QUOTE)
        yield from self._text.expect(":")
        value = yield from self._value(depth)
        return f"{json.dumps(key, ensure_ascii=False)}: {value}"

    def _value(self, depth: int) -> Generator[None, None, str]:
        """Returns a value as JSON.

        Raises:
            UnexpectedTextError: it is none, or has more levels than `depth`.
        """
        if not depth:
            raise UnexpectedTextError
        opening = yield from self._text.accept(QUOTE, "{", "[")
        if opening == QUOTE:
            return json.dumps((yield from self._text.text_until(QUOTE)), ensure_ascii=False)
        if opening is None:
            written = (yield from self._text.text_before(",}]")).strip()
            if not written:
                raise UnexpectedTextError
            return json_of(written, {}, _PLAIN_KINDS)
        closing = "}" if opening == "{" else "]"
        read = self._member if opening == "{" else self._value
        parts: list[str] = []
        while (yield from self._text.accept(closing)) is None:
            parts.append((yield from read(depth - 1)))
            yield from self._text.accept(",")
        return f"{opening}{', '.join(parts)}{closing}"
