"""The sandbox that chat templates are compiled for: what transformers offers them, and no more.

Source: transformers 5.23, utils/chat_template_utils.py, `_compile_jinja_template`.
"""

import datetime
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles templates, and holds what one rendering needs to know."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.now = datetime.datetime.now()
        """The local time that templates see."""
        self.mark = ""
        """The character that marks texts of the caller; `tojson` leaves it as it is."""
        self.filters["tojson"] = self._to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = self._strftime_now

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Writes JSON for a model to read: Jinja's own filter escapes for HTML."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return _BEYOND_ASCII.sub(self._escaped, text) if ensure_ascii else text

    def _escaped(self, match: re.Match[str]) -> str:
        return match[0] if match[0] == self.mark else json.dumps(match[0])[1:-1]

    def _strftime_now(self, pattern: str) -> str:
        return self.now.strftime(pattern)


class _GenerationTag(jinja2.ext.Extension):
    """Renders what `{% generation %}` encloses.

    transformers finds the assistant's tokens by it when it makes training data.
    """

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Reads one block; variables that it sets end with it, as in transformers."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def text_constants(syntax: jinja2.nodes.Template) -> Iterator[str]:
    """Goes through the texts that a template's expressions name, attributes included."""
    for constant in syntax.find_all(jinja2.nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
    for attribute in syntax.find_all(jinja2.nodes.Getattr):
        yield attribute.attr


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
