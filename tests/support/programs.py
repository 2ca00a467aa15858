"""Runs programs of kernels: built for a GPU without one, or in Triton's interpreter.

Each is a process of its own, because Triton reads its environment while kernels are imported.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked_program import ForkedProgram
from tests.support.forks import fork_server

_BUILT = Path(__file__).resolve().parents[2] / ".cache" / "kernels"
"""Kernels that earlier runs have built on this machine, by all that their code depends on."""
_TIMEOUT_S = 850
_MENDED = """
from tests.support.interpreter_mends import mend
mend()
"""
_QUICKLY = """
from tests.support.quick_interpreter import interpret_quickly
interpret_quickly()
"""


def run_building(program: str, *arguments: object, kept: Path = _BUILT) -> None:
    """Raises if a program that builds kernels fails; its arguments are in sys.argv.

    kept: the folder of its kernels.
    """
    variables = {"TRITON_CACHE_DIR": str(kept)}
    _run("tests.support.kernel_compiler", variables, program, *arguments)


def run_interpreted(program: str, *arguments: object, is_quick: bool = True) -> None:
    """Raises if a program whose kernels are interpreted fails; its arguments are in sys.argv.

    is_quick: whether it begins by `interpret_quickly`.
    """
    quickly = _QUICKLY if is_quick else ""
    # Triton must be imported with this variable, so not before.
    _run("torch", {"TRITON_INTERPRET": "1"}, _MENDED + quickly + program, *arguments)


def _run(imported: str, variables: Mapping[str, str], program: str, *arguments: object) -> None:
    process = ForkedProgram(
        fork_server(imported),
        ["-c", program, *map(str, arguments)],
        environment={**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""},
    )
    returncode = process.wait(_TIMEOUT_S)
    assert returncode == 0, f"the program ended with {returncode}; see standard error"
