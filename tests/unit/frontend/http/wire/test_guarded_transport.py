"""A connection ends in bounded time, whether its client reads or not."""

import asyncio

import pytest

from services.frontend.http.wire.guarded_transport import (
    LINGER_S,
    MIN_TAKEN_BYTES,
    WRITER_GRACE_S,
    GuardedTransport,
)
from tests.support.loop_time import LoopTime

SLOW_S = 1000.0


class FakeTransport(asyncio.Transport):
    """A transport whose buffer the test fills and empties."""

    def __init__(self) -> None:
        super().__init__()
        self.untaken = 0
        self.events: list[str] = []

    def get_write_buffer_size(self) -> int:
        return self.untaken

    def write(self, data: bytes) -> None:
        self.untaken += len(data)

    def can_write_eof(self) -> bool:
        return True

    def __getattribute__(self, name: str):
        if name in {"close", "abort", "write_eof", "pause_reading", "resume_reading"}:
            return lambda: self.events.append(name)
        return super().__getattribute__(name)


@pytest.fixture
async def raw() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def guarded(raw) -> GuardedTransport:
    return GuardedTransport(raw, slow_reader_timeout_s=SLOW_S, max_discarded_bytes=100)


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_client_that_takes_nothing_is_cut_in_every_state_of_its_request(raw, guarded):
    time = LoopTime()
    guarded.write(b" " * 10)
    guarded.expect_reader()
    time.wind(SLOW_S)
    await turn()
    assert raw.events == []
    time.wind(WRITER_GRACE_S)
    await turn()
    assert raw.events == ["abort"]


async def test_a_client_that_takes_some_keeps_its_connection_until_it_takes_too_little(
    raw, guarded
):
    time = LoopTime()
    guarded.write(b" " * 3 * MIN_TAKEN_BYTES)
    guarded.close()
    for _ in range(2):
        raw.untaken -= MIN_TAKEN_BYTES
        time.wind(SLOW_S + 1)
        await turn()
    assert raw.events == ["close"]
    raw.untaken -= MIN_TAKEN_BYTES - 1
    time.wind(SLOW_S + 1)
    await turn()
    assert raw.events == ["close", "abort"]


async def test_a_client_that_reads_again_is_not_cut(raw, guarded):
    time = LoopTime()
    guarded.expect_reader()
    guarded.note_read()
    time.wind(10 * SLOW_S)
    await turn()
    assert raw.events == []


async def test_a_client_that_may_be_sending_has_a_moment_to_read_its_answer(raw, guarded):
    time = LoopTime()
    guarded.has_input_left = True
    guarded.close()
    guarded.close()
    guarded.write(b"more")
    assert (guarded.is_closing(), guarded.is_discarding) == (True, True)
    assert (raw.events, raw.untaken) == (["resume_reading", "write_eof"], 0)
    time.wind(LINGER_S + 1)
    await turn()
    assert raw.events[2:] == ["abort"]


async def test_a_client_that_never_stops_sending_is_cut(raw, guarded):
    guarded.has_input_left = True
    guarded.close()
    guarded.discard(100)
    assert "abort" not in raw.events
    guarded.discard(1)
    assert raw.events[-1] == "abort"


async def test_a_connection_that_is_lost_leaves_no_timer(raw, guarded):
    time = LoopTime()
    guarded.close()
    guarded.note_lost()
    time.wind(10 * SLOW_S)
    await turn()
    assert raw.events == ["close"]
