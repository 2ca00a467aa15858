"""Finds a model's chat templates among its tokenizer files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from services.frontend.text.tokenizer import TokenizerFilesError

_FOLDER = "additional_chat_templates"
_DEFAULT = "default"
_TOOL_USE = "tool_use"


class TemplateRefusedError(TokenizerFilesError):
    """The template is invalid, so every process would refuse it."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Templates before compilation."""

    text: str
    """Jinja source."""
    variables: Mapping[str, str]
    """Variables beside the conversation: special tokens by name."""
    tool_text: str | None = None
    """Source of the template for conversations with tools; None if one serves all."""
    special_tokens: Sequence[str] = ()
    """The spellings of the tokenizer's special tokens."""

    @property
    def names_tools(self) -> bool:
        """Whether a template reads a variable `tools`; one that cannot be read counts as such."""
        environment = jinja2.Environment(autoescape=True)
        try:
            return any(
                (kind, text) == ("name", "tools")
                for source in (self.text, self.tool_text or "")
                for _, kind, text in environment.lex(source)
            )
        except jinja2.TemplateSyntaxError:
            return True

    def opening(self, *, is_strict: bool = True, writes_tools: bool = False) -> dict[str, Any]:
        """Returns the JSON that configures the template process; see `ChatTemplate`."""
        return {
            "is_strict": is_strict,
            "writes_tools": writes_tools,
            "source": self.text,
            "tool_source": self.tool_text,
            "variables": dict(self.variables),
            "special_tokens": list(self.special_tokens),
        }


def find_template(
    files: Mapping[str, bytes], *, special_tokens: Sequence[str] = ()
) -> TemplateSource | None:
    """Returns the templates; None if the model has none.

    As in transformers, files take precedence over `chat_template` in tokenizer_config.json.
    "tool_use" serves conversations with tools, "default" the others.

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
        for path in paths[::-1]  # the first one counts
        if path in files
    }


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    source = config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return dict(source) if isinstance(source, dict) else {_DEFAULT: source}


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and so on; each is text or {"content": text} in the file."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens
