"""Grammars of texts with tagged parts, such as tool calls, and of free text before a form.

A special token that is spelled in a fixed text is that token; free text has none.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.engine.errors import InvalidRequestError

FREE_TEXT = r"/(.|\n)*/"
_SPACE = r"/[ \n]{1,2}/"
"""White space that models write after their reasoning."""

Schema = Callable[[str], str]
"""Converts the text of a JSON schema to a Lark expression; may raise InvalidRequestError."""
Tokens = Mapping[str, int]
"""Ids of special tokens by their spelling."""


def tagged_grammar(fields: Mapping[str, Any], schema_of: Schema, special: Tokens) -> str:
    """Returns the Lark grammar of a tagged text.

    Args:
        fields: those of TaggedText of protos/common/v1/sampling.proto; each of its `tags` is a list
            of begin, json_schema and end.
        schema_of: converts a schema.
        special: the tokenizer's special tokens.

    Raises:
        InvalidRequestError: a schema is refused, or a first part does not begin with the trigger.
    """
    trigger, rules = fields["trigger"], []
    for index, (begin, schema, end) in enumerate(fields["tags"]):
        opening = fields["begin"] + begin
        if not opening.startswith(trigger):
            raise InvalidRequestError(f"tag {index} does not begin with the trigger")
        try:
            expression = schema_of(schema)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tag {index}: {error}") from None
        rules += [
            f"body_{index}: {expression} {_fixed(end, special)}",
            f"first_{index}: {_fixed(opening[len(trigger) :], special)} body_{index}",
            f"next_{index}: {_fixed(fields['separator'] + begin, special)} body_{index}",
        ]
    numbers = range(len(fields["tags"]))
    more = "" if fields["stop_after_first"] else f"({' | '.join(f'next_{i}' for i in numbers)})*"
    firsts = " | ".join(f"first_{i}" for i in numbers)
    parts = f"parts: ({firsts}) {more} {_fixed(fields['end'], special)}"
    if not trigger:
        return "\n".join(["start: parts", parts, *rules])
    lead = ["start: lead_text | lead parts", f"lead_text: {FREE_TEXT}"]
    return "\n".join([*lead, *_up_to("lead", trigger, special), parts, *rules])


def with_preamble(grammar: str, begin: str, end: str, special: Tokens) -> str:
    """Returns a Lark grammar with free text before it."""
    optional = "?" if begin else ""
    return "\n".join(
        [
            f"start: ({_fixed(begin, special)} preamble space?){optional} form",
            f"space: {_SPACE}",
            *_up_to("preamble", end, special),
            f"form: %lark {{\n{grammar}\n}}",
        ]
    )


def _up_to(rule: str, end: str, special: Tokens) -> list[str]:
    """Returns the rules of free text up to the first occurrence of a fixed text."""
    first, *rest = pieces_of(end, special)
    if first in special:
        return [f"{rule}: {rule}_free {_fixed(end, special)}", f"{rule}_free: {FREE_TEXT}"]
    return [
        f"{rule}: {rule}_free {_fixed(''.join(rest), special)}",
        f"{rule}_free[lazy]: {FREE_TEXT} {_quoted(first)}",
    ]


def _fixed(text: str, special: Tokens) -> str:
    """Returns the Lark expression of a fixed text."""
    pieces = pieces_of(text, special)
    return " ".join(f"<[{special[p]}]>" if p in special else _quoted(p) for p in pieces)


def pieces_of(text: str, special: Tokens) -> list[str]:
    """Divides a fixed text into special tokens and the texts between them."""
    longest_first = sorted(filter(None, special), key=len, reverse=True)
    if not longest_first:
        return [text] if text else []
    found = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [piece for piece in found if piece]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
