"""A node's end of its stream to the head: joins, obeys, and joins again.

The ranks live as long as the stream: whatever ends it ends them, so none outlives its engine.
"""

import asyncio
from typing import Any, NoReturn

import grpc
import structlog

from protos.engine.v1.node_pb2 import (
    Beat,
    HeadHello,
    HeadMessage,
    NodeHello,
    NodeMessage,
    NodeProof,
    NodeWelcome,
)
from protos.engine.v1.node_pb2_grpc import NodeServiceStub
from services.engine.edge.node_secret import NodeSecret, make_nonce
from services.engine.node.config import NodeConfig
from services.engine.node.hosted_ranks import HostedRanks
from services.engine.rpc.nodes import BEATS_PER_TIMEOUT, HELLO_TIMEOUT_S
from services.engine.worker.wire import MAX_MESSAGE_BYTES
from services.settings.installation import own_version
from services.transport.grpc_options import Options
from services.transport.server_status import ServerStatus
from services.transport.tls import ClientTls, open_channel

log = structlog.get_logger()

MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
OPTIONS: Options = [
    # No keepalive: both sides send signs of life, and a server that sends little takes pings amiss.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
"""Options of a node's channel."""
_FINAL = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses that another try would meet again."""


class RefusedNodeError(Exception):
    """The engine does not take this node, or is not the one that it belongs to."""


class LostHeadError(Exception):
    """The engine is not there now, or has ended the stream; the message says why."""


class Node:
    """Joins an engine, again and again."""

    def __init__(self, config: NodeConfig, secret: NodeSecret, tls: ClientTls | None) -> None:
        """Prepares a node.

        Args:
            config: its settings.
            secret: what it shares with the engine.
            tls: whose certificate the engine must show; None speaks plain text.
        """
        self._config = config
        self._secret = secret
        self._tls = tls
        self._has_joined = False

    async def run(self) -> NoReturn:
        """Runs until it is cancelled; ends all ranks then.

        Raises:
            RefusedNodeError: the engine does not take this node.
        """
        backoff_s, reason = MIN_BACKOFF_S, ""
        while True:
            self._has_joined = False
            try:
                await self.join()
            except LostHeadError as error:
                if self._has_joined or str(error) != reason:
                    log.warning("head_was_lost", head=self._config.head, reason=str(error))
                reason = str(error)
            if self._has_joined:
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def join(self) -> NoReturn:
        """Serves one stream.

        Raises:
            LostHeadError: it has ended.
            RefusedNodeError: the engine does not take this node.
        """
        async with open_channel(self._config.head, OPTIONS, self._tls) as channel:
            call = NodeServiceStub(channel).Join()  # type: ignore[no-untyped-call]  # generated
            stream = _Stream(call, self._config.head)
            try:
                welcome = await self._shake_hands(stream)
                await self._serve(stream, welcome)
            except TimeoutError:
                raise LostHeadError("it does not answer") from None
            except (grpc.RpcError, asyncio.InvalidStateError) as error:
                await stream.raise_reason(error)
            finally:
                call.cancel()

    async def _shake_hands(self, stream: "_Stream") -> NodeWelcome:
        """Proves that this node belongs to the engine, and sees that the engine does."""
        nonce = make_nonce()
        hello = NodeHello(version=own_version(), nonce=nonce, node=self._config.node_rank)
        await stream.write(NodeMessage(hello=hello))
        head: HeadHello = (await stream.read("hello", HELLO_TIMEOUT_S)).hello
        if not self._secret.accepts(head.proof, "head", head.nonce, nonce):
            has = "another secret than" if head.proof else "no --node-secret-file, unlike"
            raise RefusedNodeError(f"the engine at {self._config.head} has {has} this node")
        proof = self._secret.prove("node", nonce, head.nonce)
        await stream.write(NodeMessage(proof=NodeProof(proof=proof)))
        return (await stream.read("welcome", HELLO_TIMEOUT_S)).welcome

    async def _serve(self, stream: "_Stream", welcome: NodeWelcome) -> NoReturn:
        """Obeys the head until the stream ends, and then ends the ranks."""
        self._has_joined = True
        silence_timeout_s = welcome.silence_timeout_ms / 1000
        log.info("node_joined", head=self._config.head, node=welcome.node)
        ranks = HostedRanks(welcome.node, self._config.interface, stream.write)
        beating = asyncio.create_task(_beat(stream, silence_timeout_s / BEATS_PER_TIMEOUT))
        try:
            while True:
                await ranks.obey(await stream.read(None, silence_timeout_s))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await ranks.stop()


class _Stream:
    """A stream whose messages several tasks write."""

    def __init__(self, call: Any, head: str) -> None:
        self._call = call
        self._status = ServerStatus(call)
        self._head = head
        self._writing = asyncio.Lock()

    async def write(self, message: NodeMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def read(self, kind: str | None, timeout_s: float) -> HeadMessage:
        """Returns the next message, which must be of a kind unless that is None."""
        async with asyncio.timeout(timeout_s):
            message = await self._call.read()
        if message is grpc.aio.EOF:
            await self.raise_reason(None)
        if kind is not None and message.WhichOneof("message") != kind:
            raise RefusedNodeError(f"the engine at {self._head} does not follow the protocol")
        return message  # type: ignore[no-any-return]  # grpc is untyped

    async def raise_reason(self, error: Exception | None) -> NoReturn:
        """Raises the reason of the stream's end.

        Raises:
            RefusedNodeError: it would come again.
            LostHeadError: it may pass.
        """
        code, details = await self._status.wait()
        if code == grpc.StatusCode.UNIMPLEMENTED:
            details = "it takes no nodes: it lacks --num-nodes"
        if code in _FINAL:
            raise RefusedNodeError(f"the engine at {self._head}: {details}") from error
        raise LostHeadError(details or "it has ended the ranks") from error


async def _beat(stream: _Stream, interval_s: float) -> NoReturn:
    """Sends signs of life."""
    while True:
        await stream.write(NodeMessage(beat=Beat()))
        await asyncio.sleep(interval_s)
