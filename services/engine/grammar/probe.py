"""Compiles grammars not seen before, in a process that may be killed: `python -m` it.

Reads messages from standard input and answers each on standard output; a message is four bytes of
little-endian length and JSON. The first one has the tokenizer, the others an output each; an answer
is a complaint, or none and the text of the grammar.
"""

import json
import resource
import struct
import sys
from typing import Any, BinaryIO

from llguidance import LLTokenizer

from services.engine.errors import InvalidRequestError
from services.engine.grammar.grammar_text import (
    compile_grammar,
    grammar_text,
    make_tokenizer,
    shown,
)
from services.engine.request import GrammarKind, StructuredOutput

MAX_MEMORY_BYTES = 2 * 2**30
"""Address space of the process; a grammar that wants more ends it."""


def main() -> None:
    """Serves until standard input is closed."""
    # A panic of the Rust library is an answer of its own: the process is gone. No core is dumped.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    settings = _read(source)
    if settings is None:
        return
    try:
        tokenizer = make_tokenizer(**settings)
    except ValueError as error:
        _write(sink, shown(str(error)))
        return
    _write(sink, "")
    while (wanted := _read(source)) is not None:
        _write(sink, *_try(tokenizer, **wanted))


def _try(tokenizer: LLTokenizer, kind: str, texts: list[str]) -> tuple[str, str]:
    """Returns a complaint, or an empty one and the grammar."""
    try:
        text = grammar_text(StructuredOutput(GrammarKind(kind), tuple(texts)))
    except InvalidRequestError as error:
        return str(error), ""
    matcher = compile_grammar(tokenizer, text)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask builds what compiling left for later
    if matcher.is_error():
        return f"the grammar is refused: {shown(matcher.get_error())}", ""
    return "", text


def _read(source: BinaryIO) -> Any:
    """Returns the next message, None at the end."""
    header = source.read(4)
    if len(header) < 4:
        return None
    [size] = struct.unpack("<I", header)
    return json.loads(source.read(size))


def _write(sink: BinaryIO, complaint: str, grammar: str = "") -> None:
    content = json.dumps([complaint, grammar]).encode()
    sink.write(struct.pack("<I", len(content)) + content)
    sink.flush()


if __name__ == "__main__":
    main()
