"""Services that many tests share, as they come: starting them takes longer than most tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.processes import Stack, free_port, stack


@dataclass(frozen=True)
class Served:
    """Both services, and where HTTP is."""

    services: Stack
    url: str


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Services with nothing but HTTP asked for."""
    yield from _serve()


@pytest.fixture(scope="session")
def services(served: Served) -> Stack:
    return served.services


@pytest.fixture(scope="session")
def served_in_chunks() -> Iterator[Served]:
    """Services whose steps take few tokens, so that prompts are computed in chunks."""
    yield from _serve(max_num_batched_tokens=16, max_num_seqs=16)


def _serve(**engine_flags: int) -> Iterator[Served]:
    port = free_port()
    with stack(engine=engine_flags, frontend={"http_port": port}) as services:
        yield Served(services, f"http://127.0.0.1:{port}/v1")
