"""`octavo engine`: the engine in this process."""

import os
import sys

import typer

from services.client.stack import service_command


def engine(context: typer.Context) -> None:
    """Runs the engine, the GPU service, with the flags that follow.

    `octavo engine --help` lists them.
    """
    os.execv(sys.executable, service_command("engine", context.args))
