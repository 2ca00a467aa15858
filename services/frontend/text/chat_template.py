"""Renders a conversation into the prompt that a model was trained on."""

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from services.frontend.errors import InvalidRequestError
from services.frontend.text.tokenizer import TokenizerFilesError

Message = Mapping[str, Any]
"""One message of a conversation, or one tool, with the names that templates on model hubs use."""

RENDER_TIMEOUT_S = 5.0
"""A template that takes longer on a conversation is stopped between two pieces of its text."""


class ChatTemplate:
    """A model's chat template, run in a sandbox that lets it compute nothing but text.

    It sees what templates on model hubs expect: `messages`, `tools` (none where there are none),
    `add_generation_prompt`, the special
    tokens by name, `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, and
    `break` and `continue` in loops.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compiles a template.

        Args:
            source: Jinja source.
            variables: what the template sees beside the conversation, such as `bos_token`.

        Raises:
            TokenizerFilesError: the source is not valid Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(
                environment.parse(source)
            )
            """Whether the template does anything with tools."""
            self.takes_tool_calls = "tool_calls" in source
            """Whether it does anything with calls in the assistant's messages."""
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerFilesError(
                f"the chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        self._variables = dict(variables)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ChatTemplate | None":
        """Finds the template among a tokenizer's files: None when the model has none.

        chat_template.jinja comes before the `chat_template` of tokenizer_config.json; of a list of
        named templates the one named "default" counts.

        Raises:
            TokenizerFilesError: a file cannot be read or the template is not valid.
        """
        try:
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            own_file = files.get("chat_template.jinja")
            source = own_file.decode() if own_file is not None else config.get("chat_template")
        except ValueError as error:
            raise TokenizerFilesError(f"the tokenizer's files cannot be read: {error}") from None
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), max_bytes: int
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        Raises:
            InvalidRequestError: the template refuses the conversation, fails on it, knows nothing
                of tools that it has, makes more than `max_bytes` of it or takes too long.
        """
        self._check_tools(messages, tools)
        deadline_s = time.monotonic() + RENDER_TIMEOUT_S
        pieces = []
        num_bytes = 0
        try:
            for piece in self._template.generate(
                self._variables,
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
            ):
                num_bytes += len(piece.encode())
                if num_bytes > max_bytes:
                    raise InvalidRequestError(
                        f"the conversation makes a prompt of more than {max_bytes} bytes"
                    )
                if time.monotonic() > deadline_s:
                    raise InvalidRequestError(
                        f"the chat template takes more than {RENDER_TIMEOUT_S} s on it"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses: {error.message}") from None
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"the chat template fails: {error}") from None
        return "".join(pieces)

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuses what the template would leave out."""
        if tools and not self.takes_tools:
            raise InvalidRequestError("the model's chat template takes no tools", field="tools")
        if not self.takes_tool_calls and any("tool_calls" in message for message in messages):
            raise InvalidRequestError(
                "the model's chat template takes no tool calls", field="messages"
            )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token and the like; in the file each is text or {"content": text}."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON for a model to read: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)
