"""The errors of this package."""


class TokenizerFormatError(ValueError):
    """A tokenizer's file is damaged, or has something that tokenizer.json cannot say."""
