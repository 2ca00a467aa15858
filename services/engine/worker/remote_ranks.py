"""Ranks on other hosts, as the executor sees them. No torch and no gRPC here.

A node is a host that has joined; its link carries messages between the executor and the stream that
the node has opened. A link serves one start of the ranks and is then closed; the node ends its
ranks and joins again.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from protos.engine.v1.node_pb2 import HeadMessage, NodeMessage, RankCommand, RankStart, StacksOrder
from protos.engine.v1.worker_pb2 import WorkerEvent
from services.engine.errors import EngineUnavailableError, InvalidRequestError
from services.engine.worker.rank_process import (
    NodeLostError,
    RankProcess,
    WorkerDiedError,
    WorkerKilledError,
    read_event,
)

MAX_UNSENT_BYTES = 64 * 2**20
"""Orders that wait for a node's connection; a node for which more wait is lost."""
MAX_UNREAD_EVENTS = 256
"""Events of a rank that wait for the executor; then its node waits."""


class RemoteRank:
    """One rank on another host: `connect` and `start`, then `send` and `next_event`, then `stop`.

    The executor uses it as it uses a RankProcess.
    """

    pid = None
    """Its process is not one of this host's."""

    def __init__(self, rank: int, node: int) -> None:
        """Prepares a rank that is not started.

        Args:
            rank: its number.
            node: number of its host.
        """
        self.rank = rank
        self.node = node
        self.name = f"rank {rank} on node {node}"
        self.stage = ""
        """Its last stage while it started."""
        self._link: NodeLink | None = None
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._interruption: WorkerDiedError | None = None
        self._end: WorkerDiedError | None = None

    def connect(self, link: "NodeLink") -> None:
        """Uses a node's link from now on."""
        self._link = link
        link.ranks[self.rank] = self

    def start(self, *, config: str, meeting_address: str) -> None:
        """Has the node start the rank's process.

        Args:
            config: the engine's, in JSON.
            meeting_address: where rank 0 waits for the others.
        """
        assert self._link is not None, "it is connected first"
        start = RankStart(rank=self.rank, config=config, meeting_address=meeting_address)
        self._link.order(HeadMessage(start=start))

    def send(self, command: bytes) -> None:
        """Sends a serialized command. Never blocks; `next_event` shows that a node is gone."""
        assert self._link is not None, "commands are sent between start and stop"
        self._link.order(HeadMessage(command=RankCommand(rank=self.rank, command=command)))

    def interrupt(self, error: WorkerDiedError) -> None:
        """Makes `next_event` raise an error, now and later."""
        self._interruption = error
        self._changed.set()

    async def next_event(self) -> WorkerEvent:
        """Returns what the rank says next, unless that is its end.

        Raises:
            WorkerDiedError: it is gone, or its node is.
        """
        while self._interruption is None:
            if self._events:
                content = self._events.popleft()
                self._has_room.set()
                try:
                    return read_event(self.name, content)
                except DecodeError as error:
                    raise WorkerDiedError(f"{self.name} does not make sense: {error}") from error
            if self._end is not None:
                raise self._end
            self._changed.clear()
            await self._changed.wait()
        raise self._interruption

    async def put(self, event: bytes) -> None:
        """Takes an event from the node, once there is room."""
        while len(self._events) >= MAX_UNREAD_EVENTS and self._end is None:
            self._has_room.clear()
            await self._has_room.wait()
        self._events.append(event)
        self._changed.set()

    def end(self, error: WorkerDiedError) -> None:
        """Makes `next_event` raise an error once it has returned all events."""
        if self._end is None:
            self._end = error
        self._changed.set()
        self._has_room.set()

    def show_stacks(self) -> None:
        """Has the rank write on its node's standard error what its threads do."""
        if self._link is not None:
            self._link.order(HeadMessage(show_stacks=StacksOrder(rank=self.rank)))

    async def stop(self) -> None:
        """Ends the rank, and all others of its node. May be called again."""
        if self._link is not None:
            self._link.close()
        self._link = None
        self.end(WorkerDiedError(f"{self.name} was stopped"))


Rank = RankProcess | RemoteRank
"""A rank on this host or on another one."""


class NodeLink:
    """The connection to one node, for one start of its ranks."""

    def __init__(self, node: int, address: str) -> None:
        """Opens a link without ranks.

        Args:
            node: the node's number.
            address: whence it has joined, for messages.
        """
        self.node = node
        self.ranks: dict[int, RemoteRank] = {}
        """Its ranks by number, once they are ordered."""
        self.loss: NodeLostError | None = None
        """Why the node is lost, if it is."""
        self.is_taken = False
        """Whether an executor uses it or has used it."""
        self.is_closed = False
        """Whether nothing is sent any more."""
        self._address = address
        self._orders: deque[HeadMessage] = deque()
        self._num_unsent_bytes = 0
        self._changed = asyncio.Event()

    def order(self, message: HeadMessage) -> None:
        """Sends a message to the node. Never blocks."""
        if self.is_closed:
            return
        self._orders.append(message)
        self._num_unsent_bytes += message.ByteSize()
        self._changed.set()
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self.lose(f"over {MAX_UNSENT_BYTES} bytes of orders wait for its connection")

    async def next_order(self, timeout_s: float) -> HeadMessage | None:
        """Returns the next message for the node; None after `timeout_s`, or once it is closed."""
        if not self._orders and not self.is_closed:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        if self.is_closed:
            return None
        message = self._orders.popleft()
        self._num_unsent_bytes -= message.ByteSize()
        return message

    async def take(self, message: NodeMessage) -> None:
        """Takes a message of the node.

        Raises:
            InvalidRequestError: it makes no sense here.
        """
        kind = message.WhichOneof("message")
        if kind == "beat":
            return
        if kind not in ("event", "end"):
            raise InvalidRequestError(f"a node that has joined sends no {kind}")
        report = getattr(message, kind)
        rank = self.ranks.get(report.rank)
        if rank is None:
            raise InvalidRequestError(f"node {self.node} has no rank {report.rank}")
        if kind == "event":
            await rank.put(message.event.event)
        else:
            error_type = WorkerKilledError if message.end.was_killed else WorkerDiedError
            rank.end(error_type(message.end.error))

    def lose(self, reason: str) -> None:
        """Ends all ranks of a node that is gone."""
        if self.loss is None and not self.is_closed:
            self.loss = NodeLostError(f"node {self.node} ({self._address}) was lost: {reason}")
            for rank in self.ranks.values():
                rank.end(self.loss)
        self.close()

    def close(self) -> None:
        """Ends the stream; the node ends its ranks then."""
        self.is_closed = True
        self._orders.clear()
        self._changed.set()


class JoinedNodes:
    """The nodes that have joined an engine."""

    def __init__(self, num_nodes: int) -> None:
        """Starts without any.

        Args:
            num_nodes: hosts of the engine, its own included.
        """
        self._num_nodes = num_nodes
        self._links: dict[int, NodeLink] = {}
        self._changed = asyncio.Event()

    def admit(self, node: int | None, address: str) -> NodeLink:
        """Adds a node.

        Args:
            node: the number that it wants; None takes the first free one.
            address: whence it comes.

        Raises:
            EngineUnavailableError: its number, or every number, is taken now.
            InvalidRequestError: there is no such number.
        """
        last = self._num_nodes - 1
        if node is None:
            node = next((each for each in range(1, last + 1) if each not in self._links), None)
            if node is None:
                raise EngineUnavailableError(f"all {last} nodes beside the head have joined")
        elif not 1 <= node <= last:
            raise InvalidRequestError(
                f"there is no node {node}: with --num-nodes {self._num_nodes} they have numbers "
                f"from 1 to {last}"
            )
        elif node in self._links:
            raise EngineUnavailableError(f"node {node} has joined already")
        link = self._links[node] = NodeLink(node, address)
        self._changed.set()
        return link

    def remove(self, link: NodeLink) -> None:
        """Frees the number of a node whose stream has ended."""
        del self._links[link.node]
        self._changed.set()

    def close(self) -> None:
        """Ends the streams of all nodes, for an engine that stops."""
        for link in self._links.values():
            link.close()

    async def wait_for_all(
        self, limit_s: float, on_progress: Callable[[str], None]
    ) -> list[NodeLink]:
        """Waits until all nodes have joined; returns their links, which are then taken.

        Args:
            limit_s: the longest wait.
            on_progress: gets the names of the missing nodes.

        Raises:
            WorkerDiedError: some did not join in time; the message names them.
        """
        missing = self._missing()
        try:
            async with asyncio.timeout(limit_s):
                while missing:
                    on_progress(f"waiting for {_names(missing)} to join")
                    before = missing
                    while missing == before:
                        self._changed.clear()
                        await self._changed.wait()
                        missing = self._missing()
        except TimeoutError:
            raise WorkerDiedError(
                f"{_names(missing)} did not join within {limit_s:g} s; octavo worker-node on the "
                "other hosts joins them"
            ) from None
        links = [self._links[node] for node in range(1, self._num_nodes)]
        for link in links:
            link.is_taken = True
        return links

    def _missing(self) -> list[int]:
        free = {node for node, link in self._links.items() if not link.is_taken}
        return [node for node in range(1, self._num_nodes) if node not in free]


def _names(nodes: list[int]) -> str:
    return ", ".join(f"node {node}" for node in nodes)
