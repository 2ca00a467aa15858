"""Requests' grammars in the form of llguidance, and the limits of compilation."""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.engine.errors import InvalidRequestError
from services.engine.grammar.exact_schema import make_exact
from services.engine.grammar.schema import read_schema, schemas_of
from services.engine.grammar.tagged import Tokens, tagged_grammar, with_preamble
from services.engine.structured_output import GrammarKind, StructuredOutput

_JSON_OPTIONS = {
    # A space, or a new line and its indentation. Models that loop love blanks: given more room, the
    # embedded one fills it, which spends max_tokens on nothing.
    "whitespace_pattern": r" |\n[ \t]{0,24}",
    "lenient": False,
}
"""A schema's own "x-guidance" may not change this: unknown keywords are refused, not ignored."""
_NO_FORCING = '%llguidance {"no_forcing": true}'
"""Keeps masks where only one text is possible.

By default llguidance tokenizes such a text, and takes "<|im_end|>" in it for the special token.
Masks never do: they compare bytes, and a special token has none.
"""
_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_RULE_OF_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SCHEMA_AT = "at 1(8): failed to compile JSON schema: "


def grammar_text(wanted: StructuredOutput, special_tokens: Tokens | None = None) -> str:
    """Returns an output's grammar in llguidance's form, unvalidated.

    Args:
        wanted: the output.
        special_tokens: tokens that may be spelled in the fixed texts of tags and preambles.

    Raises:
        InvalidRequestError: a schema is not JSON, or has a keyword that is not enforced; a grammar
            is written in GBNF.
    """
    special = special_tokens or {}
    match wanted.kind:
        case GrammarKind.JSON_SCHEMA:
            grammar = f"start: {_of_schema(read_schema(wanted.texts[0]))}"
        case GrammarKind.JSON_OBJECT:
            grammar = f"start: {_of_schema({'type': 'object'})}"
        case GrammarKind.REGEX:
            [own] = json.loads(LLMatcher.grammar_from_regex(wanted.texts[0]))["grammars"]
            grammar = own["lark_grammar"]
        case GrammarKind.LARK:
            grammar = _lark(wanted.texts[0])
        case GrammarKind.CHOICE:
            # Lark's literals are written like those of JSON.
            texts = (json.dumps(text, ensure_ascii=False) for text in wanted.texts)
            grammar = "start: " + " | ".join(texts)
        case GrammarKind.TAGGED:
            grammar = tagged_grammar(
                json.loads(wanted.texts[0]), lambda text: _of_schema(read_schema(text)), special
            )
        case None:
            raise AssertionError("an output without a form has no grammar")
    if wanted.preamble is not None:
        grammar = with_preamble(grammar, *wanted.preamble, special)
    # The last line, so that a caller's lines keep their numbers in messages.
    return f"{grammar}\n{_NO_FORCING}"


def _lark(text: str) -> str:
    if _RULE_OF_GBNF.search(text):
        raise InvalidRequestError(
            "the grammar has a rule with ::=, as in GBNF; it must be in Lark, such as "
            'start: "a" | "b" start'
        )
    return text


def _of_schema(schema: dict[str, Any]) -> str:
    make_exact(list(schemas_of(schema)))
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), **_JSON_OPTIONS}
    try:
        text = json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except ValueError:
        raise InvalidRequestError("json_schema has a number that is too large") from None
    return f"%json {text}"


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compiles a grammar; `is_error` of the result is true if it is invalid.

    The limits bound any grammar's memory, 2 kB per state, and the time of one token, 25 ms on
    2026's processors. They do not bound the time to compile; see probe.
    """
    limits = LLParserLimits(
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,  # a state of the parser says nothing to a caller
    )
    return LLMatcher(tokenizer, text, log_level=0, limits=limits)


def make_tokenizer(
    tokenizer_json: str, *, vocab_size: int, eos_token_ids: list[int]
) -> LLTokenizer:
    """Reads a tokenizer for grammars.

    Takes one to three seconds for 150,000 tokens, holding the interpreter lock.

    Args:
        tokenizer_json: content of tokenizer.json.
        vocab_size: the model's; tokens that only the tokenizer knows count too.
        eos_token_ids: tokens that end a complete output.

    Raises:
        ValueError: llguidance cannot use it.
    """
    content = json.loads(tokenizer_json)
    vocabulary = content.get("model", {}).get("vocab")
    if not vocabulary:
        raise ValueError("tokenizer.json has no vocabulary")
    if isinstance(vocabulary, dict):
        texts = {token_id: text for text, token_id in vocabulary.items()}
    else:  # pairs of text and score, as Unigram models have them
        texts = {token_id: text for token_id, (text, _) in enumerate(vocabulary)}
    added = {token["id"]: token for token in content.get("added_tokens", ())}
    size = max(vocab_size, 1 + max(texts), 1 + max(added, default=0))
    # A token that ends the output is never text, even where its tokenizer takes it for a plain one.
    plain = [i for i in eos_token_ids if not added.get(i, {}).get("special")]
    for token_id in plain:
        if token_id in added:
            added[token_id]["special"] = True
        elif token_id in texts:
            added[token_id] = _special_token(token_id, texts[token_id])
    if plain:
        tokenizer_json = json.dumps({**content, "added_tokens": list(added.values())})
    return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos_token_ids or None)


def special_tokens_of(tokenizer_json: str) -> dict[str, int]:
    """Returns the ids of a tokenizer's special tokens by their spelling."""
    added = json.loads(tokenizer_json).get("added_tokens", ())
    return {token["content"]: token["id"] for token in added if token.get("special")}


def _special_token(token_id: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": True, **flags}


def shown(message: str) -> str:
    """Returns an error of llguidance, cut to the length of a status."""
    message = _EXCERPT.sub("", message).removesuffix("<non-verbose/>").removeprefix(_SCHEMA_AT)
    line = " ".join(message.split())
    if line.startswith("NoExtension"):
        return "no finite output follows it, as of a rule or schema that is only itself"
    return line if len(line) <= 400 else f"{line[:400]}..."
