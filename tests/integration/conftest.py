"""Services that many tests share, as they come: starting them takes longer than most tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import (
    LONG_TIMEOUTS,
    Flag,
    ServiceProcess,
    Stack,
    free_port,
    stack,
)
from tests.support.steered_engine import MODULE


@dataclass(frozen=True)
class Served:
    """Both services, and where HTTP is."""

    services: Stack
    url: str


@pytest.fixture(scope="module", autouse=True)
def services_with_long_timeouts() -> Iterator[None]:
    """Services that tests start by a command of theirs have long timeouts too; other tests see
    nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LONG_TIMEOUTS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def services_are_forked() -> Iterator[None]:
    """Importing torch takes an engine longer than most tests take."""
    # A GPU's libraries read a worker's environment when they are loaded.
    has_gpu = Path("/proc/driver/nvidia").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServiceProcess, "forks", not has_gpu)
        yield


@pytest.fixture
def services_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services start as operators start them, with workers that are their children."""
    monkeypatch.setattr(ServiceProcess, "forks", False)


@pytest.fixture(scope="session")
def stop_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sets the token at which a steered engine stops its worker."""
    return tmp_path_factory.mktemp("steered") / "stop"


@pytest.fixture(scope="session")
def served(stop_file: Path) -> Iterator[Served]:
    """Services with nothing but HTTP asked for; `stop_file` may stop the worker."""
    yield from _serve(module=MODULE, stop_file=stop_file)


@pytest.fixture(scope="session")
def services(served: Served) -> Stack:
    return served.services


@pytest.fixture(scope="session")
def served_in_chunks() -> Iterator[Served]:
    """Services whose steps take few tokens, so that prompts are computed in chunks."""
    yield from _serve(max_num_batched_tokens=16, max_num_seqs=16)


def _serve(**engine_flags: Flag) -> Iterator[Served]:
    port = free_port()
    with stack(engine=engine_flags, frontend={"http_port": port}) as services:
        yield Served(services, f"http://127.0.0.1:{port}/v1")
