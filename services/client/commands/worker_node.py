"""`octavo worker-node`: ranks of an engine on another host."""

import os
import sys

import typer

from services.client.stack import service_command


def worker_node(context: typer.Context) -> None:
    """Runs ranks of an engine on this host, with the flags that follow.

    `octavo worker-node --help` lists them.
    """
    os.execv(sys.executable, service_command("engine", ["worker-node", *context.args]))
