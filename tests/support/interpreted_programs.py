"""Runs programs in Triton's interpreter on the CPU, each in a process of its own."""

import os
import subprocess
import sys

_QUICKLY = """
from tests.support.quick_interpreter import interpret_quickly
interpret_quickly()
"""


def run_interpreted(program: str, *arguments: object) -> None:
    """Raises if the program fails; its arguments are in sys.argv."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _QUICKLY + program, *map(str, arguments)]
    subprocess.run(command, env=environment, check=True, timeout=850)
