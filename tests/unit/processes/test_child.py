"""Children end with their parent and import nothing from the current folder."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

from services.processes.child import child_command, python_command
from services.processes.helper_frames import QUESTION_HEADER

HOSTILE = "print('imported from the current folder', flush=True)"
SHADOWED = ("models", "protos", "runpy", "services", "structlog", "uvloop")


@pytest.fixture
def hostile_folder(tmp_path):
    """A folder whose files have the names of modules that services import."""
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (child_command, "services.engine"),
        (child_command, "services.frontend"),
        (python_command, "services.client.cli"),
    ],
)
def test_a_module_runs_the_same_in_a_folder_that_shadows_its_imports(
    hostile_folder, command, module
):
    done = subprocess.run(
        command(module, ["--help"]), cwd=hostile_folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "imported from" not in done.stdout
    assert "usage: " in done.stdout.lower()


def test_the_children_of_a_child_do_not_import_from_the_current_folder_either(hostile_folder):
    package = hostile_folder / "elsewhere" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "starter.py").write_text(
        dedent("""
            import subprocess, sys
            subprocess.run([sys.executable, "-m", "package.end"], check=True)
        """)
    )
    (package / "end.py").write_text("import structlog; print('end')")
    path = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    done = subprocess.run(
        child_command("package.starter"),
        cwd=hostile_folder,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr


@pytest.mark.parametrize("is_child_ready", [True, False])
def test_a_child_ends_when_its_parent_is_killed(is_child_ready):
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            dedent("""
                import signal, subprocess, sys
                from services.processes.child import child_command

                child = subprocess.Popen(child_command("tests.support.odd_helper"), stdin=0)
                sys.stdout.write("started\\n")
                sys.stdout.flush()
                signal.pause()
            """),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        if is_child_ready:
            parent.stdin.write(bytes(QUESTION_HEADER.size))  # an empty opening message
            parent.stdin.flush()
            assert len(parent.stdout.read(len(b"started\n") + 5)) == len(b"started\n") + 5
        else:
            parent.stdout.readline()
        parent.kill()
        # Its input stays open, so only its parent's death ends the child, and with it the output.
        assert parent.stdout.read() == b""
