"""Services that many tests share, as they come: starting them takes longer than most tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.processes import Stack, free_port, stack

PATIENT_ENGINE = {"grammar_timeout_s": 30}
PATIENT_FRONTEND = {"engine_silence_timeout_s": 60, "template_timeout_s": 60}
"""Limits that a machine does not reach by holding a service up for a while."""


@dataclass(frozen=True)
class Served:
    """Both services, and where HTTP is."""

    services: Stack
    url: str


@pytest.fixture(scope="module", autouse=True)
def patient_services(request: pytest.FixtureRequest) -> Iterator[None]:
    """Services wait longer than they usually would, but for those whose tests are of faults."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "faults":
            for service, flags in (("ENGINE", PATIENT_ENGINE), ("FRONTEND", PATIENT_FRONTEND)):
                for name, value in flags.items():
                    patch.setenv(f"OCTAVO_{service}_{name.upper()}", str(value))
        yield


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Services with nothing but HTTP asked for; a request's seed may halt the worker."""
    yield from _serve(module="tests.support.halting_engine")


@pytest.fixture(scope="session")
def services(served: Served) -> Stack:
    return served.services


@pytest.fixture(scope="session")
def served_in_chunks() -> Iterator[Served]:
    """Services whose steps take few tokens, so that prompts are computed in chunks."""
    yield from _serve(max_num_batched_tokens=16, max_num_seqs=16)


def _serve(**engine_flags: int | str) -> Iterator[Served]:
    port = free_port()
    frontend_flags = {"http_port": port, **PATIENT_FRONTEND}
    with stack(engine=engine_flags, frontend=frontend_flags) as services:
        yield Served(services, f"http://127.0.0.1:{port}/v1")
