"""The process that compiles new grammars; `probe_pool` starts it.

The opening message has the tokenizer, each question an output, both as JSON. An answer is the text
of the grammar.
"""

import json
from collections.abc import Callable

from services.engine.errors import InvalidRequestError
from services.engine.grammar.grammar_text import (
    compile_grammar,
    grammar_text,
    make_tokenizer,
    shown,
    special_tokens_of,
)
from services.engine.structured_output import GrammarKind, StructuredOutput
from services.processes.helper_program import Refusal, limit_resources, run_helper

MAX_MEMORY_BYTES = 2 * 2**30
"""Address space of the process; a grammar that needs more ends it."""


def open_probe(opening: bytes) -> Callable[[bytes], bytes]:
    """Reads a tokenizer and returns the function that compiles outputs.

    Args:
        opening: arguments of `make_tokenizer`, as JSON.

    Raises:
        Refusal: the tokenizer cannot be used.
    """
    # A panic of the Rust library is an answer of its own: the process is gone.
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES, may_start_threads=True)
    settings = json.loads(opening)
    try:
        tokenizer = make_tokenizer(**settings)
    except ValueError as error:
        raise Refusal(shown(str(error))) from None

    special_tokens = special_tokens_of(settings["tokenizer_json"])

    def probe(question: bytes) -> bytes:
        wanted = json.loads(question)
        try:
            preamble = tuple(wanted["preamble"]) if wanted["preamble"] else None
            output = StructuredOutput(GrammarKind(wanted["kind"]), tuple(wanted["texts"]), preamble)
            text = grammar_text(output, special_tokens)
        except InvalidRequestError as error:
            raise Refusal(str(error)) from None
        matcher = compile_grammar(tokenizer, text)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask builds what compiling left for later
        if matcher.is_error():
            raise Refusal(f"the grammar is refused: {shown(matcher.get_error())}")
        return text.encode()

    return probe


if __name__ == "__main__":
    run_helper(open_probe)
