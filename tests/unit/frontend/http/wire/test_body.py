"""Bodies take bounded memory, and a caller over its limits has none read."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from services.frontend.errors import OverloadedError
from services.frontend.http.wire.body import MAX_BODIES, MAX_BODIES_OF_ACCOUNT, Bodies, Body
from services.transport.counts import LocalCounts
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

ALICE, BOB = "alice-0123456789", "bob-0123456789ab"
BODY = b'{"model": "fake", "prompt": "one two"}'


def filled(bodies: Bodies, account: str) -> Body:
    body = Body(bodies, account)
    body.append(b" " * 10)
    return body


def test_one_accounts_bodies_leave_room_for_others():
    bodies = Bodies(LocalCounts(), max_bytes=10)
    held = [filled(bodies, "alice") for _ in range(MAX_BODIES_OF_ACCOUNT)]
    with pytest.raises(OverloadedError, match="the limit is 40"):
        filled(bodies, "alice")
    filled(bodies, "bob")
    held[0].close()
    held[0].close()
    filled(bodies, "alice")


def test_all_bodies_together_have_a_limit_and_refused_ones_leave_nothing():
    counts = LocalCounts()
    bodies = Bodies(counts, max_bytes=10)
    held = [filled(bodies, f"{i}") for i in range(MAX_BODIES)]
    with pytest.raises(OverloadedError, match="the limit is 160"):
        filled(bodies, "late")
    for body in held:
        body.close()
    assert not counts._held


@contextlib.asynccontextmanager
async def listening(tmp_path: Path, limits: str):
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "{ALICE}"\n{limits}\n[keys.bob]\nkey = "{BOB}"\n')
    writers = []
    async with (
        FakeEngine() as engine,
        frontend_stack(
            engine, http_port=0, api_keys_file=path, max_live_requests=2, max_message_bytes=2**16
        ) as stack,
    ):

        async def post(key: str, body: bytes, length: int, *others: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.http_port)
            writers.append(writer)
            head = [
                b"POST /v1/completions HTTP/1.1",
                b"host: x",
                b"content-type: application/json",
                b"authorization: Bearer " + key.encode(),
                b"content-length: %d" % length,
                *others,
            ]
            writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
            return reader

        try:
            yield post, stack.server.requests.counts
        finally:
            for writer in writers:
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def test_a_key_at_its_limit_takes_no_slot_with_bodies_that_do_not_come(tmp_path):
    async with listening(tmp_path, "max_live_requests = 1") as (post, counts):
        # It waits for its body: the server asks for it.
        first = await post(ALICE, b"", 100, b"expect: 100-continue")
        assert await first.readline() == b"HTTP/1.1 100 Continue\r\n"
        for _ in range(3):
            refused = await post(ALICE, b"{", 100)
            assert (await refused.readline()).startswith(b"HTTP/1.1 429")
        assert counts.failed["OverloadedError"] == 3
        served = await post(BOB, BODY, len(BODY))
        assert await served.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_a_key_without_tokens_is_refused_before_its_body_comes(tmp_path):
    async with listening(tmp_path, "tokens_per_minute = 1") as (post, _):
        served = await post(ALICE, BODY, len(BODY))
        assert await served.readline() == b"HTTP/1.1 200 OK\r\n"
        refused = await post(ALICE, b"{", 100)
        assert (await refused.readline()).startswith(b"HTTP/1.1 429")


async def test_a_body_that_is_declared_too_large_is_not_awaited(tmp_path):
    async with listening(tmp_path, "") as (post, _):
        refused = await post(ALICE, b"{", 2**16 + 1)
        assert (await refused.readline()).startswith(b"HTTP/1.1 413")
