"""The rules that keep the tree readable, as tests: layers, sizes, contracts, error tables."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from models import forward_context
from models.cudagraph_mode import CUDAGraphMode
from protos.engine.v1 import batch_pb2
from services.engine import batch

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500


def _source_files() -> list[Path]:
    folders = ("services", "models", "scripts", "tests", "examples")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_every_import_contract_holds():
    tool = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run(
        [tool, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_source_file_is_longer_than_the_cap():
    sizes = {path: len(path.read_text().splitlines()) for path in _source_files()}
    assert {p: n for p, n in sizes.items() if n > MAX_FILE_LINES} == {}


def test_no_module_is_called_after_nothing():
    banned = {"utils", "util", "common", "misc", "helpers", "helper"}
    assert [path for path in _source_files() if path.stem in banned] == []


def test_only_one_module_makes_the_command_lines_of_processes():
    # Python's -m puts the current folder on the search path, and a process must follow its parent.
    sources = [path for folder in ("services", "models") for path in (ROOT / folder).rglob("*.py")]
    spawners = [p for p in sources if p.stem != "child" and '"-m"' in p.read_text()]
    assert spawners == []


def test_package_inits_hold_a_docstring_and_nothing_else():
    inits = [p for p in _source_files() if p.name == "__init__.py" and "tests" not in p.parts]
    too_full = [path for path in inits if len(path.read_text().splitlines()) > 3]
    assert too_full == []


BROAD_EXCEPTS = {
    "services/transport/interceptors.py": "the gRPC edge: every error becomes a status",
    "services/frontend/http/endpoint.py": "the HTTP edge: every error becomes a response",
    "services/telemetry/metrics_server.py": "the metrics edge: every error fails one scrape",
    "services/engine/rpc/session.py": "a fault in one request must not end its session",
    "services/frontend/rpc/session.py": "a fault in one request must not end its session",
    "services/frontend/engine_client/client.py": "a fault costs the session with one engine",
    "services/engine/core/worker_supervisor.py": "a fault costs the worker, and another one starts",
    "services/engine/worker/runner/adapter_store.py": "a bad file must not end the worker",
    "services/engine/worker/runner/weight_store.py": "a bad file must not end the worker",
    "services/engine/worker/process.py": "a fault ends the worker, which reports it first",
    "services/engine/worker/start/loaded_model.py": "a model that cannot be traced is served",
    "services/engine/worker/start/tower_compilation.py": "an encoder that cannot be compiled runs",
    "services/engine/compilation/trace/transformed_code.py": "a decompiler's fault costs one file",
    "services/engine/grammar/constraint.py": "the Rust library panics with a BaseException",
}
"""File -> why one handler in it catches every error and goes on."""


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches every error and does not end by raising."""
    caught = ast.unparse(handler.type) if handler.type is not None else "BaseException"
    is_cleanup = isinstance(handler.body[-1], ast.Raise)
    return not is_cleanup and bool({"Exception", "BaseException"} & set(re.findall(r"\w+", caught)))


def test_every_error_is_caught_only_where_the_list_says_why():
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("services", "models")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    ]
    assert sorted(found) == sorted(BROAD_EXCEPTS)


def test_generated_code_is_what_the_contracts_say():
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gen_protos.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_ranks_exchange_no_pickled_objects():
    # torch.distributed's functions for objects unpickle what another host has sent.
    uses = re.compile(r"\b(all_gather|broadcast|gather|scatter|send|recv)_object(_list|s)?\b")
    sources = [path for folder in ("services", "models") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if uses.search(path.read_text())] == []


def test_every_script_is_executable():
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    with_shebang = [p for p in scripts if p.read_text().startswith("#!")]
    assert [path for path in with_shebang if not os.access(path, os.X_OK)] == []


class TestBatchDescriptorMirrorsForwardContext:
    """The message on the wire and the context in the worker say the same things."""

    def test_every_context_field_travels_or_is_listed_as_local(self):
        on_wire = set(batch_pb2.BatchDescriptor.DESCRIPTOR.fields_by_name)
        for field in dataclasses.fields(forward_context.ForwardContext):
            name = "graph_key" if field.name == "batch_descriptor" else field.name
            is_local = name in forward_context.PROCESS_LOCAL_FIELDS
            assert is_local != (name in on_wire), f"{field.name} must travel or be local"

    @pytest.mark.parametrize(
        ("message", "mirror", "made_by_worker", "stays_on_wire"),
        [
            (
                batch_pb2.Context,
                forward_context.Context,
                forward_context.WORKER_MADE_CONTEXT_FIELDS,
                set(),
            ),
            (batch_pb2.GraphKey, forward_context.GraphKey, set(), set()),
            (
                batch_pb2.AttentionMetadata,
                forward_context.AttentionMetadata,
                forward_context.WORKER_MADE_ATTENTION_FIELDS,
                {"block_table_updates", "shared_prefixes"},
            ),
            (
                batch_pb2.SpecDecodeMetadata,
                forward_context.SpecDecodeMetadata,
                set(),
                {"carried_requests"},
            ),
            (batch_pb2.DPMetadata, forward_context.DPMetadata, set(), set()),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_nested_fields_have_the_same_names(
        self, message, mirror, made_by_worker, stays_on_wire
    ):
        on_wire = set(message.DESCRIPTOR.fields_by_name)
        in_process = {field.name for field in dataclasses.fields(mirror)}
        assert in_process - made_by_worker == on_wire - stays_on_wire

    def test_the_wire_knows_exactly_the_modes_that_a_forward_pass_can_have(self):
        on_wire = [mode.number for mode in batch_pb2.CUDAGraphMode.DESCRIPTOR.values if mode.number]
        modes = [batch.runtime_mode(number) for number in on_wire]
        assert set(modes) == CUDAGraphMode.valid_runtime_modes()
        assert len(modes) == len(set(modes))
