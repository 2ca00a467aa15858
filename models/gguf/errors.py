"""The error of all modules that read GGUF files."""


class GgufError(ValueError):
    """A GGUF file is damaged, or asks for something unsupported; the message is one line."""
