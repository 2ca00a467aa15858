"""`octavo generate`: one prompt, continued."""

import asyncio
import sys
from typing import Annotated

import typer

from services.client.channel import Access
from services.client.client import OctavoClient
from services.client.console import echo
from services.client.flags import DEFAULT_FRONTEND, FrontendAddress, TimeoutSeconds, structured
from services.client.requests import Options
from services.client.structured_output import Structure
from services.client.terminal import AsJson, show, show_json


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
    asyncio.run(_generate(text, options, timeout_s, frontend, access, as_json))


async def _generate(
    prompt: str,
    options: Options,
    timeout_s: float | None,
    address: str,
    access: Access,
    as_json: bool,
) -> None:
    async with OctavoClient(address, access=access) as client:
        stream = client.generate(prompt, options, timeout_s=timeout_s)
        if as_json:
            await show_json(stream)
            return
        answer = await show(stream)
        echo(answer.summary(), err=True)
