"""`octavo replay`: runs recorded steps again."""

import os
import sys

import typer

from services.client.stack import service_command


def replay(context: typer.Context) -> None:
    """Runs the steps of a recording again, with and without graphs, and compares the two.

    It names the first step and tensor that differ. `octavo record` makes a recording. --against
    says what steps without graphs are compared with: `full` graphs of whole steps, `piecewise`
    graphs of pieces, `eager` no graphs either, `invariant` each row alone. The other flags are the
    engine's own; `octavo replay --help` lists them.

    Example: `octavo replay trace.binpb --against full`
    """
    os.execv(sys.executable, service_command("engine", ["replay", *context.args]))
