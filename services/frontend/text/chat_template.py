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
import jinja2.sandbox

Message = Mapping[str, str]
"""One message of a conversation: its role and its content."""


class TemplateError(Exception):
    """A template is not valid, refuses a conversation, or fails on it."""


class ChatTemplate:
    """A model's chat template, run in a sandbox that lets it compute nothing but text.

    It sees what templates on model hubs expect: `messages`, `add_generation_prompt`, the special
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
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            # Jinja computes constants when it compiles, and Python's own compiler has limits.
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], *, max_bytes: int) -> str:
        """Returns the prompt for the answer to a conversation.

        Raises:
            TemplateError: the template refuses the conversation, fails on it, or makes more than
                `max_bytes` of it.
        """
        pieces = []
        num_bytes = 0
        try:
            for piece in self._template.generate(
                self._variables, messages=list(messages), add_generation_prompt=True
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


def _to_json(value: Any, indent: int | None = None) -> str:
    """Writes JSON for a model to read: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(pattern)
