"""Renders a conversation into the prompt that a model was trained on.

Templates come from model folders and are programs. The sandbox keeps them from everything but text;
it does not keep them from taking for ever, so this runs in a process that can be ended: see
`template_process`.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

Message = Mapping[str, Any]
"""One message of a conversation, or one tool, with the names that templates on model hubs use."""


class TemplateError(Exception):
    """A template is not valid, refuses a conversation, or fails on it."""


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
            TemplateError: the source is not valid Jinja.
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
            raise TemplateError(
                f"the chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            # Jinja computes constants when it compiles, and Python's own compiler has limits.
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None
        self._variables = dict(variables)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), max_bytes: int
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        Raises:
            TemplateError: the template refuses the conversation, fails on it, knows nothing of
                tools that it has, or makes more than `max_bytes` of it.
        """
        self._check_tools(messages, tools)
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
                    raise TemplateError(
                        f"the conversation makes a prompt of more than {max_bytes} bytes"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses: {error.message}") from None
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise TemplateError(f"the chat template fails: {error}") from None
        return "".join(pieces)

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuses what the template would leave out."""
        if tools and not self.takes_tools:
            raise TemplateError("the model's chat template takes no tools")
        if not self.takes_tool_calls and any("tool_calls" in message for message in messages):
            raise TemplateError("the model's chat template takes no tool calls")


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
