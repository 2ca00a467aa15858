"""The command's flags and its one-line complaints."""

import os
import subprocess
import sys

import pytest

from services.frontend.__main__ import main
from services.frontend.config import FrontendConfig

START = """
import os, runpy, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Finder)
sys.argv = ["frontend", "--port", "70000"]
runpy.run_module("services.frontend", run_name="__main__")
"""


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["frontend", *arguments])
    return main()


def test_a_value_out_of_range_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "--port", "70000") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo frontend: --port is '70000': ")
    assert "less than or equal to 65535" in line


def test_a_port_for_two_listeners_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "--port", "8000", "--http-port", "8000", "--processes", "2") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "octavo frontend: --http-port is 8000: it must differ from --port"


def test_no_number_is_without_bounds():
    unbounded = [
        flag
        for flag, schema in FrontendConfig.model_json_schema()["properties"].items()
        for form in (schema, *schema.get("anyOf", ()))
        if form.get("type") in ("integer", "number") and "maximum" not in form
    ]
    assert unbounded == []


def test_a_folder_without_tokenizer_is_one_line(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--tokenizer", str(tmp_path)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no tokenizer.json" in line


@pytest.mark.parametrize("host", ["10.0.0.1", "a b", "pictures.test:0", "https://pictures.test"])
def test_a_host_that_images_cannot_come_from_is_one_line(monkeypatch, capsys, host):
    assert run(monkeypatch, "--media-hosts", f"pictures.test,{host}") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo frontend: --media-hosts")


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["--port"]])
def test_arguments_that_are_no_flags_or_lack_a_value_are_one_line(monkeypatch, capsys, arguments):
    assert run(monkeypatch, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo frontend: ")
    assert arguments[0] in line


def test_the_environment_sets_flags(monkeypatch):
    monkeypatch.setenv("OCTAVO_FRONTEND_ENGINE_ADDRESS", "engine:1")
    assert FrontendConfig().engine_address == "engine:1"


def test_help_explains_every_flag(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in FrontendConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_grpc_prepares_for_no_forks():
    """Its threads could crash a process for images between fork and exec."""
    environment = {name: value for name, value in os.environ.items() if "GRPC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.returncode) == (["0"], 2)
