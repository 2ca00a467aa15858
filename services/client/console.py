"""All that the command line writes to a terminal; what strangers wrote cannot command it.

Models, servers and callers of a server choose texts and names that commands show.
"""

import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType  # noqa: TID251  this is the one
from rich.segment import Segment
from rich.text import Text

from services.processes.terminal_text import terminal_text


def echo(text: str = "", *, nl: bool = True, err: bool = False, **style: Any) -> None:
    """Writes text to standard output or error, as it is if that is no terminal.

    Args:
        text: what to write; lines are kept.
        nl: ends the line.
        err: writes to standard error.
        style: as of typer.style.
    """
    stream = sys.stderr if err else sys.stdout
    # A closed standard stream is None.
    is_terminal = stream is not None and stream.isatty()
    shown = terminal_text(text, keeps_lines=True) if is_terminal else text
    typer.echo(typer.style(shown, **style) if style else shown, nl=nl, err=err)  # noqa: TID251  as above


class TerminalConsole(Console):
    """Writes tables and progress; texts in them are no markup."""

    def __init__(self, *, stderr: bool = False) -> None:
        """Writes to standard output, or to standard error."""
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Converts a string of a table, whose width counts the escapes."""
        return super().render_str(terminal_text(text, keeps_lines=True), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Renders parts of the output, with what a terminal would obey in their texts escaped."""
        for segment in super().render(renderable, options):
            text = terminal_text(segment.text, keeps_lines=True)
            yield segment if segment.control else segment._replace(text=text)
