"""The errors of this package, and its limits."""

MAX_MERGES = 2**21
"""Most pairs of tokens that together are a token; released vocabularies have below 2**20."""


class TokenizerFormatError(ValueError):
    """A tokenizer's file is damaged, or has something that tokenizer.json cannot say."""


def check_merges(num_merges: int) -> None:
    """Checks the pairs found so far.

    Raises:
        TokenizerFormatError: they are more than MAX_MERGES.
    """
    if num_merges > MAX_MERGES:
        raise TokenizerFormatError(f"more than {MAX_MERGES} pairs of its tokens make a token")
