"""`octavo cache`: what the engine has compiled and kept."""

import os
import sys

import typer

from services.client.stack import service_command


def explain(context: typer.Context) -> None:
    """Says whether compiled pieces exist for an engine with the flags that follow.

    If not, it lists what was compiled and which facts differ: flags, source files, versions,
    device.

    Example: `octavo cache explain --model ~/models/qwen3-0.6b --compilation-level 3`
    """
    os.execv(sys.executable, service_command("engine", ["cache", "explain", *context.args]))
