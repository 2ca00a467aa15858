"""The prompt that a completion repeats: its text, and where in it each of its tokens begins."""

from collections.abc import Sequence

from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], decoded: str) -> str:
    """Returns the text of a prompt of token ids, special tokens left out.

    A character that the prompt leaves unfinished belongs to the output, which finishes it.

    Args:
        tokenizer: the model's.
        token_ids: the prompt.
        decoded: what the tokenizer's library makes of it: sentencepiece drops the first space.
    """
    text = Detokenizer(tokenizer.token_bytes(show_special_tokens=False)).push(token_ids)
    return text[1:] if text.startswith(" ") and not decoded.startswith(" ") else text


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Returns where in the text of a prompt each of its tokens begins, in characters.

    A special token counts where the text spells it out; one that the text leaves out, or that
    the tokenizer adds, begins where the next token does.
    """
    shown = tokenizer.token_bytes(show_special_tokens=True)
    visible = tokenizer.token_bytes(show_special_tokens=False)
    offsets = []
    position = 0
    for token_id in token_ids:
        content = visible[token_id]
        if content:
            position += _num_skipped(content, text, position)
        offsets.append(min(position, len(text)))
        if not content:
            spelling = shown[token_id].decode("utf-8", "replace")
            position += len(spelling) if text.startswith(spelling, position) else 0
            continue
        position += num_characters(content)
        if content.startswith(b" ") and not text.startswith(" ", offsets[-1]):
            position -= 1  # sentencepiece puts a space before the first word
    return offsets


def num_characters(content: bytes) -> int:
    """Returns how many characters begin in some bytes of UTF-8.

    A byte 10xxxxxx goes on with a character, any other begins one.
    """
    return sum(byte & 0xC0 != 0x80 for byte in content)


def _num_skipped(content: bytes, text: str, position: int) -> int:
    """Returns the whitespace before a token that a special token before it has taken in."""
    if content[:1].isspace():
        return 0
    skipped = 0
    while text[position + skipped : position + skipped + 1].isspace():
        skipped += 1
    return skipped
