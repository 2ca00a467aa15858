"""Finds a model's chat template among its tokenizer's files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.frontend.text.tokenizer import TokenizerFilesError


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template that nobody has compiled yet."""

    text: str
    """Jinja source."""
    variables: Mapping[str, str]
    """What the template sees beside the conversation: the special tokens by name."""


def find_template(files: Mapping[str, bytes]) -> TemplateSource | None:
    """Returns the template; None when the model has none.

    chat_template.jinja comes before the `chat_template` of tokenizer_config.json; of a list of
    named templates the one named "default" counts.

    Raises:
        TokenizerFilesError: a file cannot be read.
    """
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        own_file = files.get("chat_template.jinja")
        source = own_file.decode() if own_file is not None else config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
    except (ValueError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise TokenizerFilesError(f"the tokenizer's files cannot be read: {error}") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerFilesError("the chat template is no text")
    return TemplateSource(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and the like; in the file each is text or {"content": text}."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
