"""The sandbox of chat templates, with the same features as in transformers.

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
    """Compiles templates and holds the state of one rendering."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.now = datetime.datetime.now()
        """The local time for templates."""
        self.mark = ""
        """The mark of caller texts; `tojson` leaves it unchanged."""
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
        """Writes JSON for a model; Jinja's own filter escapes for HTML."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return _BEYOND_ASCII.sub(self._escaped, text) if ensure_ascii else text

    def _escaped(self, match: re.Match[str]) -> str:
        return match[0] if match[0] == self.mark else json.dumps(match[0])[1:-1]

    def _strftime_now(self, pattern: str) -> str:
        return self.now.strftime(pattern)


class _GenerationTag(jinja2.ext.Extension):
    """Renders the content of `{% generation %}`.

    transformers uses the tag to find the assistant's tokens in training data.
    """

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parses one block; its variables are local, as in transformers."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def text_constants(syntax: jinja2.nodes.Template) -> Iterator[str]:
    """Yields the strings in a template's expressions, including attribute names."""
    for constant in syntax.find_all(jinja2.nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
    for attribute in syntax.find_all(jinja2.nodes.Getattr):
        yield attribute.attr


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
