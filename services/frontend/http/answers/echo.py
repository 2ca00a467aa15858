"""The text of an echoed prompt, and the offsets of its tokens."""

from collections.abc import Sequence

from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], decoded: str) -> str:
    """Returns the text of a prompt of token ids, without special tokens.

    The output completes an unfinished last character. `decoded` is the library's decoding:
    sentencepiece drops the first space.
    """
    text = Detokenizer(tokenizer.token_bytes(show_special_tokens=False)).push(token_ids)
    return text[1:] if text.startswith(" ") and not decoded.startswith(" ") else text


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns the offset in characters of each token in a prompt's text.

    A special token that the text omits has the offset of the next token.
    """
    shown = tokenizer.token_bytes(show_special_tokens=True)
    visible = tokenizer.token_bytes(show_special_tokens=False)
    decoder = Detokenizer(visible)
    offsets = []
    position = 0
    for token_id in token_ids:
        content = visible[token_id]
        has_begun = decoder.is_inside_character
        if content and not has_begun:
            position += _num_skipped(content, text, position)
        offsets.append(min(position + has_begun, len(text)))
        if not content:
            spelling = shown[token_id].decode("utf-8", "replace")
            position += len(spelling) if text.startswith(spelling, position) else 0
            continue
        position += len(decoder.push([token_id]))
        if content.startswith(b" ") and not text.startswith(" ", offsets[-1]):
            position -= 1  # sentencepiece adds a space before the first word
    return offsets


def _num_skipped(content: bytes, text: str, position: int) -> int:
    """Returns the length of whitespace that a preceding special token absorbed."""
    if content[:1].isspace():
        return 0
    skipped = 0
    while text[position + skipped : position + skipped + 1].isspace():
        skipped += 1
    return skipped
