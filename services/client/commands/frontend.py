"""`octavo frontend`: the frontend in this process."""

import os
import sys

import typer

from services.client.stack import service_command


def frontend(context: typer.Context) -> None:
    """Runs the frontend, the text service, with the flags that follow.

    `octavo frontend --help` lists them.
    """
    os.execv(sys.executable, service_command("frontend", context.args))
