"""Commands where only the distribution itself is installed, without its extras."""

import os
import subprocess
import sys

import pytest
from typer.main import get_command

from services.client.cli import app
from services.settings.installation import MODULES
from tests.support.processes import ROOT

NEEDED = {
    "serve": "engine,frontend",
    "demo": "engine,frontend",
    "pull a/b": "engine",
    "engine --help": "engine",
    "frontend --help": "frontend",
    "worker-node --help": "engine",
    "replay --help": "engine",
    "cache explain": "engine",
}
"""Command that needs extras -> their names."""
PACKAGES = {module.partition(".")[0] for modules in MODULES.values() for module in modules}
HIDING = f"""
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PACKAGES}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""
"""Hides the packages of all extras: Python runs it when it starts, in children too."""
FAILING = """
import os
import runpy
import sys
import services.client.cli

for command in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.argv = ["services.client", *command.split()]
        runpy.run_module("services.client", run_name="__main__", alter_sys=True)
        sys.exit()
    assert os.waitpid(child, 0)[1], command
"""
"""Runs commands one after the other, each in a process of its own."""
SHOWING_HELP = """
import sys
from typer.testing import CliRunner
from services.client.cli import app

for command in sys.argv[1:]:
    shown = CliRunner().invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0, command
    assert "Usage:" in shown.output, command
"""


def commands(group, words=()):
    if not hasattr(group, "commands"):
        return [" ".join(words)]
    return [
        name for word, inner in group.commands.items() for name in commands(inner, (*words, word))
    ]


@pytest.fixture
def bare_python(tmp_path):
    """Runs Python where no extra is installed."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return run


def test_a_command_names_the_extras_that_it_lacks_in_one_line(bare_python):
    done = bare_python("-c", FAILING, *NEEDED)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(NEEDED), done.stderr
    for line, extras in zip(lines, NEEDED.values(), strict=True):
        assert f"pip install '.[{extras}]'" in line


def test_every_other_command_needs_no_extra(bare_python):
    alone = {command.removesuffix(" --help").removesuffix(" a/b") for command in NEEDED}
    others = set(commands(get_command(app))) - alone
    assert len(others) > len(alone)
    done = bare_python("-c", SHOWING_HELP, *others)
    assert done.returncode == 0, done.stderr
