import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def explain(*flags):
    return subprocess.run(
        [sys.executable, "-m", "services.engine", "cache", "explain", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_engine_explains_its_cache_and_does_not_serve(tmp_path):
    flags = ["--device", "cpu", "--compilation-level", "3", "--compile-cache-dir", str(tmp_path)]
    answer = explain(*flags)
    assert answer.stdout == f"nothing compiled for this configuration in {tmp_path}\n"
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("flags", [["--compilation-level", "9"], ["--model", "/nowhere"]])
def test_wrong_flags_are_an_error(flags):
    answer = explain(*flags)
    assert answer.returncode == 2
    assert answer.stderr.startswith("octavo engine: ")
