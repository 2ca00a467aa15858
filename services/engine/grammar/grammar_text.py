"""What a request asks for, as a grammar of llguidance, with the limits that it compiles under."""

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.engine.errors import InvalidRequestError
from services.engine.request import GrammarKind, StructuredOutput

if TYPE_CHECKING:  # the class exists for type checkers alone
    from llguidance._lib import JsonCompileOptions

_JSON_OPTIONS: "JsonCompileOptions" = {
    # A space, or a new line and its indentation. Models that loop love blanks: given more room, the
    # embedded one fills it, which spends max_tokens on nothing.
    "whitespace_pattern": r" |\n[ \t]{0,24}",
    "lenient": False,
}
"""What a schema's own "x-guidance" may not change: an unknown keyword is refused, not ignored."""


def grammar_text(wanted: StructuredOutput) -> str:
    """Returns the grammar of an output in llguidance's own form; whether it is valid shows later.

    Raises:
        InvalidRequestError: a schema is not JSON.
    """
    match wanted.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(wanted.texts[0], overrides=_JSON_OPTIONS)
            except ValueError as error:
                raise InvalidRequestError(f"json_schema cannot be read: {error}") from None
        case GrammarKind.JSON_OBJECT:
            schema = '{"type": "object"}'
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(wanted.texts[0])
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(wanted.texts[0])
        case GrammarKind.CHOICE:
            # Lark's literals are written like those of JSON.
            texts = (json.dumps(text, ensure_ascii=False) for text in wanted.texts)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))


def compile_grammar(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Compiles a grammar; `is_error` of the result says whether it is valid.

    The limits bound the memory, and the time of one token, of any grammar: at most 25 ms of 2026's
    processors and 2 kB for each state. They do not bound the time to compile; see probe.
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

    It takes one to three seconds for 150,000 tokens and keeps the interpreter lock all the time.

    Args:
        tokenizer_json: content of tokenizer.json.
        vocab_size: the model's; tokens that only the tokenizer knows count too.
        eos_token_ids: tokens that end an output wherever it is complete.

    Raises:
        ValueError: llguidance cannot use it.
    """
    content = json.loads(tokenizer_json)
    vocabulary = content.get("model", {}).get("vocab")
    if not vocabulary:
        raise ValueError("tokenizer.json has no vocabulary")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = [token["id"] for token in content.get("added_tokens", ())]
    size = max(vocab_size, 1 + max(ids), 1 + max(added, default=0))
    return LLTokenizer(tokenizer_json, n_vocab=size, eos_token=eos_token_ids or None)


def shown(message: str) -> str:
    """Returns a complaint of llguidance, cut to what a status can carry."""
    line = " ".join(message.removesuffix("<non-verbose/>").split())
    return line if len(line) <= 400 else f"{line[:400]}..."
