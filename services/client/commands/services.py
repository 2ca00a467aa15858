"""Commands that become another program: `octavo engine`, `frontend`, `replay` and others."""

import os
import sys
from typing import NoReturn

import typer

from services.client.stack import service_command


def engine(context: typer.Context) -> None:
    """Runs the engine, the GPU service, with the flags that follow.

    `octavo engine --help` lists them.
    """
    _become("engine", *context.args)


def frontend(context: typer.Context) -> None:
    """Runs the frontend, the text service, with the flags that follow.

    `octavo frontend --help` lists them.
    """
    _become("frontend", *context.args)


def worker_node(context: typer.Context) -> None:
    """Runs ranks of an engine on this host, with the flags that follow.

    `octavo worker-node --help` lists them.
    """
    _become("engine", "worker-node", *context.args)


def replay(context: typer.Context) -> None:
    """Runs the steps of a recording again, with and without graphs, and compares the two.

    It names the first step and tensor that differ. `octavo record` makes a recording. --against
    says what steps without graphs are compared with: `full` graphs of whole steps, `piecewise`
    graphs of pieces, `eager` no graphs either, `invariant` each row alone. The other flags are the
    engine's own; `octavo replay --help` lists them.

    Example: `octavo replay trace.binpb --against full`
    """
    _become("engine", "replay", *context.args)


def explain(context: typer.Context) -> None:
    """Says whether compiled pieces exist for an engine with the flags that follow.

    If not, it lists what was compiled and which facts differ: flags, source files, versions,
    device.

    Example: `octavo cache explain --model ~/models/qwen3-0.6b --compilation-level 3`
    """
    _become("engine", "cache", "explain", *context.args)


def _become(service: str, *arguments: str) -> NoReturn:
    os.execv(sys.executable, service_command(service, arguments))
