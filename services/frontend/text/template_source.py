"""Finds a model's chat templates among its tokenizer's files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.text.tokenizer import TokenizerFilesError

_FOLDER = "additional_chat_templates"
_DEFAULT = "default"
_TOOL_USE = "tool_use"


class TemplateRefusedError(TokenizerFilesError):
    """The template itself is wrong, so that no other process would take it either."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Templates that are not compiled yet."""

    text: str
    """Jinja source."""
    variables: Mapping[str, str]
    """Variables that templates see beside the conversation: the special tokens by name."""
    tool_text: str | None = None
    """Source of the template for conversations with tools; None where one serves all."""
    special_tokens: Sequence[str] = ()
    """How the tokenizer's special tokens are spelled."""

    def opening(self) -> dict[str, Any]:
        """Returns what the process needs that runs the templates, as JSON."""
        return {
            "source": self.text,
            "tool_source": self.tool_text,
            "variables": dict(self.variables),
            "special_tokens": list(self.special_tokens),
        }


def find_template(
    files: Mapping[str, bytes], *, special_tokens: Sequence[str] = ()
) -> TemplateSource | None:
    """Returns the templates; None when the model has none.

    As in transformers, files (chat_template.jinja, additional_chat_templates/) come before the
    `chat_template` of tokenizer_config.json, which may name several. The one named "tool_use"
    serves conversations with tools, "default" the others; other names are for callers of
    transformers to choose from.

    Raises:
        TokenizerFilesError: a file cannot be read.
    """
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        named = _from_files(files) or _from_config(config)
    except (ValueError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise TokenizerFilesError(f"the tokenizer's files cannot be read: {error}") from None
    source, tool_source = named.get(_DEFAULT), named.get(_TOOL_USE)
    for text in (source, tool_source):
        if not isinstance(text, str | None):
            raise TokenizerFilesError("the chat template is no text")
    if source is None:
        if tool_source is None:
            return None
        source = "{{ raise_exception('the model has a chat template for tools only') }}"
    return TemplateSource(
        source, _named_tokens(config), tool_text=tool_source, special_tokens=tuple(special_tokens)
    )


def _from_files(files: Mapping[str, bytes]) -> dict[str, Any]:
    places = {
        _DEFAULT: ("chat_template.jinja", f"{_FOLDER}/{_DEFAULT}.jinja"),
        _TOOL_USE: (f"{_FOLDER}/{_TOOL_USE}.jinja",),
    }
    return {
        name: files[path].decode()
        for name, paths in places.items()
        for path in paths[::-1]  # the first one of them counts
        if path in files
    }


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    source = config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return dict(source) if isinstance(source, dict) else {_DEFAULT: source}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and the like; in the file each is text or {"content": text}."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
