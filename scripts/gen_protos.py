#!/usr/bin/env python3
"""Generates the Python code beside each .proto file.

Run it after editing a contract and commit what it writes. `--check` writes nothing and exits 1 when
the committed code differs from what the contracts say now. The generator is pinned (grpcio-tools in
pyproject.toml) because generated code refuses runtimes older than its generator.
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> list[Path]:
    """Writes the generated code under `out` and returns the paths relative to it."""
    protos = sorted(path.relative_to(ROOT) for path in ROOT.glob("protos/**/*.proto"))
    include = files("grpc_tools") / "_proto"
    arguments = [
        "protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}",
        *map(str, protos),
    ]  # fmt: skip
    services = [str(path) for path in protos if "\nservice " in (ROOT / path).read_text()]
    with_services = ["protoc", f"-I{ROOT}", f"-I{include}", f"--grpc_python_out={out}", *services]
    for command in (arguments, with_services):
        if protoc.main(command) != 0:
            sys.exit("protoc failed")
    return sorted(path.relative_to(out) for path in out.rglob("*_pb2*.py*"))


def main() -> None:
    """Generates, or with --check compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        generated = generate(out)
        committed = {path.relative_to(ROOT) for path in ROOT.glob("protos/**/*_pb2*.py*")}
        committed = {path for path in committed if "__pycache__" not in path.parts}
        stale = [
            path
            for path in generated
            if not (ROOT / path).exists() or not filecmp.cmp(out / path, ROOT / path, shallow=False)
        ]
        orphans = sorted(committed - set(generated))
        if check:
            if stale or orphans:
                sys.exit(f"stale generated code, run scripts/gen_protos.py: {stale + orphans}")
            return
        for path in stale:
            shutil.copyfile(out / path, ROOT / path)
        for path in orphans:
            (ROOT / path).unlink()
        print(f"{len(generated)} generated files, {len(stale)} changed, {len(orphans)} removed")


if __name__ == "__main__":
    main()
