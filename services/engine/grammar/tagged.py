"""Grammars of texts with tagged parts, such as tool calls, and of free text before a form.

A special token that is spelled in a fixed text is that token; free text has none.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from services.engine.errors import InvalidRequestError
from services.engine.grammar.argument_pairs import PairRules, Texts
from services.engine.grammar.nested_values import NestedValues
from services.engine.grammar.schema import read_schema

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
            of begin, json_schema, end and the fields of `pairs`, or None.
        schema_of: converts a schema.
        special: the tokenizer's special tokens.

    Raises:
        InvalidRequestError: a schema is refused, a first part begins with no trigger, or no part
            with one of them.
    """
    triggers = sorted(fields["triggers"] or [""], key=len)
    firsts: list[list[str]] = [[] for _ in triggers]
    rules: list[str] = []
    for index, (begin, schema, end, pairs) in enumerate(fields["tags"]):
        opening = fields["begin"] + begin
        first = next((i for i, text in enumerate(triggers) if opening.startswith(text)), None)
        if first is None:
            raise InvalidRequestError(f"tag {index} does not begin with the trigger")
        firsts[first].append(f"first_{index}")
        try:
            expression = _document(index, schema, pairs, rules, schema_of, special)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"tag {index}: {error}") from None
        rules += [
            f"body_{index}: {expression} {_fixed(end, special)}",
            f"first_{index}: {_fixed(opening[len(triggers[first]) :], special)} body_{index}",
            f"next_{index}: {_fixed(fields['separator'] + begin, special)} body_{index}",
        ]
    if unused := [text for text, begun in zip(triggers, firsts, strict=True) if not begun]:
        raise InvalidRequestError(f"no tag begins with the trigger {unused[0]!r:.64}")
    nexts = " | ".join(f"next_{index}" for index in range(len(fields["tags"])))
    is_single, is_mixed = fields["stop_after_first"], fields["has_text_between"]
    more = "" if is_single or is_mixed else f"({nexts})*"
    leads = []
    for index, (trigger, begun) in enumerate(zip(triggers, firsts, strict=True)):
        rules.append(
            f"parts_{index}: ({' | '.join(begun)}) {more} {_fixed(fields['end'], special)}"
        )
        if trigger:
            rules += _up_to(f"lead_{index}", trigger, special)
            leads.append(f"lead_{index} parts_{index}")
    if not leads:
        return "\n".join(["start: parts_0", *rules])
    led = " | ".join(leads)
    times = "?" if is_single else "*"
    start = f"({led}){times} lead_text" if is_mixed else f"lead_text | {led}"
    return "\n".join([f"start: {start}", f"lead_text: {FREE_TEXT}", *rules])


def _document(
    index: int,
    schema: str,
    pairs: Mapping[str, Any] | None,
    rules: list[str],
    schema_of: Schema,
    special: Tokens,
) -> str:
    """Returns the expression of a tag's document, and adds the rules that it needs."""
    if pairs is None:
        return schema_of(schema)
    texts = Texts(
        of_schema=lambda each: schema_of(json.dumps(each)),
        fixed=lambda text: _fixed(text, special),
        up_to=lambda rule, text: _up_to(rule, text, special),
    )
    values = NestedValues(f"tag_{index}", pairs, texts)
    is_nested = pairs["quote"] or pairs["elements"]
    of_schema = values.expression if is_nested else texts.of_schema
    writer = PairRules(f"tag_{index}", pairs, of_schema=of_schema, texts=texts)
    expression = writer.expression(read_schema(schema))
    rules += [*writer.rules, *values.rules]
    return expression


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
