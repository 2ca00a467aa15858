"""The head's end of the streams of nodes: who may join, and what travels then."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from protos.engine.v1.node_pb2 import (
    Beat,
    HeadHello,
    HeadMessage,
    NodeHello,
    NodeMessage,
    NodeWelcome,
)
from protos.engine.v1.node_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server
from services.engine.config.parallel import ParallelConfig
from services.engine.edge.node_secret import NONCE_BYTES, NodeSecret, make_nonce
from services.engine.edge.request_reader import check_known
from services.engine.errors import EngineError, InvalidRequestError, NotPermittedError
from services.engine.worker.remote_ranks import JoinedNodes, NodeLink
from services.settings.installation import own_version
from services.transport.callers import address_of
from services.transport.message_limits import MalformedMessageError
from services.transport.message_reader import RefusedMessage
from services.transport.refused_calls import RefusedCalls

log = structlog.get_logger()

HELLO_TIMEOUT_S = 10.0
"""Time limit of each of a node's first two messages."""
BEATS_PER_TIMEOUT = 5
"""Signs of life within the silence that means a loss."""

_Messages = AsyncIterator[NodeMessage | RefusedMessage]


class NodeServicer(NodeServiceServicer):
    """The method of NodeService; the interceptor maps the errors that it raises."""

    def __init__(self, nodes: JoinedNodes, config: ParallelConfig, refused: RefusedCalls) -> None:
        """Serves the nodes of one engine.

        Args:
            nodes: gets each node that joins.
            config: names the secret's file and the silence that means a loss.
            refused: records nodes with another secret.

        Raises:
            NodeSecretError: the secret cannot be read.
        """
        self._nodes = nodes
        self._refused = refused
        self._secret = NodeSecret.from_file(config.node_secret_file)
        self._silence_timeout_s = config.node_silence_timeout_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves the method on a server."""
        add_NodeServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]  # generated

    async def Join(  # noqa: N802  the protocol's name
        self,
        messages: _Messages,
        context: "grpc.aio.ServicerContext[NodeMessage, HeadMessage]",
    ) -> None:
        """Serves one node for one start of its ranks."""
        hello = await self._shake_hands(messages, context)
        node = hello.node if hello.HasField("node") else None
        link = self._nodes.admit(node, address_of(context.peer()))
        log.info("node_joined", node=link.node, peer=context.peer())
        # The end of either ends the stream; a node that does not read must not hold up its end.
        tasks = [
            asyncio.create_task(self._receive(messages, link)),
            asyncio.create_task(self._send(context, link)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            link.lose("its connection ended")
            self._nodes.remove(link)
            reason = str(link.loss or "the engine has ended its ranks")
            log.info("node_left", node=link.node, peer=context.peer(), reason=reason)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _shake_hands(self, messages: _Messages, context: Any) -> NodeHello:
        """Checks that the other side is a node of this engine; returns its first message.

        Raises:
            InvalidRequestError: it does not follow the protocol, or has another version.
            NotPermittedError: it does not know the secret.
        """
        hello: NodeHello = (await _next(messages, "hello")).hello
        ours = own_version()
        if hello.version != ours:
            raise InvalidRequestError(
                f"the node runs Octavo {hello.version}, the engine {ours}: both must be the same"
            )
        if len(hello.nonce) != NONCE_BYTES:
            raise InvalidRequestError(f"a node's nonce has {NONCE_BYTES} bytes")
        nonce = make_nonce()
        proof = self._secret.prove("head", nonce, hello.nonce)
        await context.write(HeadMessage(hello=HeadHello(version=ours, nonce=nonce, proof=proof)))
        answer = (await _next(messages, "proof")).proof
        if not self._secret.accepts(answer.proof, "node", hello.nonce, nonce):
            has = "another secret than" if answer.proof else "no secret, and cannot join"
            reason = f"it has {has} the engine"
            self._refused.note("node_was_refused", peer=context.peer(), reason=reason)
            raise NotPermittedError(f"the node has {has} the engine")
        return hello

    async def _receive(self, messages: _Messages, link: NodeLink) -> None:
        """Takes the node's messages until it leaves, or nothing comes."""
        try:
            while True:
                async with asyncio.timeout(self._silence_timeout_s):
                    message = await anext(messages, None)
                if message is None:
                    link.lose("it left")
                    return
                if isinstance(message, RefusedMessage):
                    raise InvalidRequestError(str(message.error))
                check_known(message)
                await link.take(message)
        except TimeoutError:
            link.lose(f"nothing came from it for {self._silence_timeout_s:g} s")
        except (EngineError, MalformedMessageError) as error:
            link.lose(str(error))

    async def _send(self, context: Any, link: NodeLink) -> None:
        """Sends orders, and signs of life between them, until the link is closed."""
        silence_timeout_ms = int(self._silence_timeout_s * 1000)
        welcome = NodeWelcome(node=link.node, silence_timeout_ms=silence_timeout_ms)
        await context.write(HeadMessage(welcome=welcome))
        while not link.is_closed:
            order = await link.next_order(self._silence_timeout_s / BEATS_PER_TIMEOUT)
            if not link.is_closed:
                await context.write(order or HeadMessage(beat=Beat()))


async def _next(messages: _Messages, kind: str) -> NodeMessage:
    """Returns the next message of a node that has not joined yet.

    Raises:
        InvalidRequestError: it is another one, or late.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await anext(messages, None)
    except TimeoutError:
        raise InvalidRequestError(f"a node must send {kind} within {HELLO_TIMEOUT_S:g} s") from None
    if not isinstance(message, NodeMessage) or message.WhichOneof("message") != kind:
        raise InvalidRequestError(f"a node must send {kind} first")
    check_known(message)
    return message
