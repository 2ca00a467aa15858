"""`octavo replay`: runs recorded steps again."""

import os
import sys

import typer

from services.client.stack import service_command


def replay(context: typer.Context) -> None:
    """Runs the steps of a recording again and names the first tensor that differs.

    The flags that follow are the engine's own; `octavo replay --help` lists them.

    Example: `octavo replay trace.binpb --against full`
    """
    os.execv(sys.executable, service_command("engine", ["replay", *context.args]))
