"""MiniMax M3: as M2, with a token before each tag, and arguments as elements at any depth.

A list has elements named item; an object has those of its members.
Source: the chat template of MiniMaxAI/MiniMax-M3.
"""

import json
from collections.abc import Generator

from services.frontend.engine_client.messages import ArgumentPairs
from services.frontend.reply.bare_values import ArgumentSchemas
from services.frontend.reply.call_form import CallForm
from services.frontend.reply.formats.minimax_m2 import NAME_END
from services.frontend.reply.incoming_text import UnexpectedTextError, Wait
from services.frontend.reply.reply_reader import ReplyReader

BEFORE_TAG = "]<]minimax[>["
CALLS, CALLS_END, CALL = "<tool_call>", "</tool_call>", '<invoke name="'
CALL_END = f"{BEFORE_TAG}</invoke>"
TAG, TAG_END = f"{BEFORE_TAG}<", ">"
ITEM = "item"
MAX_DEPTH = 64
"""Levels of objects and lists in an argument."""
_ENDS_OF_CALLS = ("/invoke", "/tool_call")


class MinimaxM3Reader(ReplyReader):
    """Reads calls as JSON; each argument is passed on when it is complete."""

    think = ("<mm:think>", "</mm:think>")
    call_form = CallForm(
        f"{BEFORE_TAG}{CALL}NAME{NAME_END}",
        f"{CALL_END}\n",
        begin=f"{BEFORE_TAG}{CALLS}\n",
        end=f"{BEFORE_TAG}{CALLS_END}",
        trigger=f"{BEFORE_TAG}{CALLS}",
        pairs=ArgumentPairs(
            begin=TAG, assign=TAG_END, end=f"{TAG}/", bare_strings=True, elements=True
        ),
    )
    call_markers = (BEFORE_TAG,)
    special_tokens = (BEFORE_TAG, CALLS, CALLS_END)

    def _read_reply(self) -> Wait:
        while (yield from self._read_content(BEFORE_TAG)) is not None:
            yield from self._try_call(
                self._read_tag(),
                opening=BEFORE_TAG,
                closing=(CALL_END,),
                following=(f"{BEFORE_TAG}{CALL}", f"{BEFORE_TAG}{CALLS_END}"),
            )

    def _read_tag(self) -> Wait:
        """Reads a call, with the tag of all calls before it or without, or the end of all."""
        tag = yield from self._text.expect(CALLS, CALL, CALLS_END)
        if tag == CALLS:
            yield from self._text.expect(f"{BEFORE_TAG}{CALL}")
        if tag != CALLS_END:
            yield from self._read_call()

    def _read_call(self) -> Wait:
        name = (yield from self._text.text_until(NAME_END)).strip()
        self._start_call(name)
        schemas, opening = self._schemas_of(name), "{"
        while (key := (yield from self._next_tag())) != "/invoke":
            if key.startswith("/"):
                raise UnexpectedTextError
            value = yield from self._element(key, schemas.within(key), MAX_DEPTH)
            self._emit_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")
            opening = ", "
        self._emit_arguments("{}" if opening == "{" else "}")
        self._has_all_arguments = True

    def _next_tag(self) -> Generator[None, None, str]:
        """Returns what is in the tag that follows."""
        yield from self._text.expect(TAG)
        return (yield from self._text.text_until(TAG_END))

    def _element(
        self, name: str, schemas: ArgumentSchemas, depth: int
    ) -> Generator[None, None, str]:
        """Returns the value of an element as JSON, and reads its end.

        The name in its end does not matter, unless that is the end of the call.

        Raises:
            UnexpectedTextError: it has text beside elements, no end, or more levels than `depth`.
        """
        written = yield from self._text.text_until(TAG)
        tag = yield from self._text.text_until(TAG_END)
        parts: list[tuple[str, str]] = []
        while tag != f"/{name}" and not (tag.startswith("/") and tag not in _ENDS_OF_CALLS):
            if tag in _ENDS_OF_CALLS or written.strip() or not depth:
                raise UnexpectedTextError
            inner = schemas.items if tag == ITEM and schemas.is_list else schemas.within(tag)
            parts.append((tag, (yield from self._element(tag, inner, depth - 1))))
            tag = yield from self._next_tag()
        if not parts:
            return schemas.value(written)
        if schemas.is_list and all(key == ITEM for key, _ in parts):
            return f"[{', '.join(value for _, value in parts)}]"
        members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in parts)
        return f"{{{', '.join(members)}}}"
