"""`octavo tokenize`: text as the model sees it."""

import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from services.client.calls import ask_frontend
from services.client.channel import Access
from services.client.console import TerminalConsole, echo
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds
from services.client.requests import Message


def tokenize(
    *,
    text: Annotated[str | None, typer.Argument(help="The text; standard input if absent.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat it as a user's message in the chat template.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, on one line.")] = False,
    timeout_s: TimeoutSeconds = 10.0,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Shows the tokens of a text: position, id, and the text of each by itself.

    Examples:
    - `octavo tokenize "Hello there"`

    - `octavo tokenize --chat "Hello there" --ids`
    """
    content = sys.stdin.read() if text is None else text
    source = [Message(role="user", content=content)] if chat else content
    tokens = ask_frontend(frontend, access, lambda each: each.tokenize(source, timeout_s=timeout_s))
    if ids:
        echo(" ".join(str(token.id) for token in tokens))
        return
    table = Table("position", "id", "token")
    for position, token in enumerate(tokens):
        # Quotes make spaces and line breaks visible; Text keeps "[...]" from being read as markup.
        table.add_row(str(position), str(token.id), Text(repr(token.text)))
    TerminalConsole().print(table)
