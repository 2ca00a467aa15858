"""`octavo generate`: one prompt, continued."""

import sys
from typing import Annotated

import typer

from services.client.calls import ask_frontend
from services.client.channel import Access
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds, structured
from services.client.requests import Options
from services.client.structured_output import Structure
from services.client.terminal import AsJson, show_once


def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; standard input if absent.")
    ] = None,
    options: Options,
    structure: Structure,
    as_json: AsJson = False,
    timeout_s: TimeoutSeconds = None,
    frontend: FrontendAddress = DEFAULT_FRONTEND,
    access: Access,
) -> None:
    """Continues a prompt; the text goes to standard output, what it cost to standard error.

    A flag that is absent means the model's own default.

    Examples:
    - `octavo generate "Once upon a time" --max-tokens 40 --temperature 0`

    - `cat prompt.txt | octavo generate --stop END`

    - `octavo generate "A date: " --regex "[0-9]{4}-[0-9]{2}-[0-9]{2}"`
    """
    options = structured(options, structure)
    text = sys.stdin.read() if prompt is None else prompt
    ask_frontend(
        frontend,
        access,
        lambda each: show_once(each.generate(text, options, timeout_s=timeout_s), as_json=as_json),
    )
