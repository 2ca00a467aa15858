"""Orders to all ranks to read adapters, and their answers. No torch here."""

import asyncio
from collections.abc import Callable

from protos.engine.v1.worker_pb2 import AdapterRead, ForgetAdapter, ReadAdapter, WorkerCommand
from services.engine.worker.rank_process import WorkerDiedError


class AdapterOrders:
    """Has the ranks of one executor read and forget adapters, beside their steps."""

    def __init__(self, num_ranks: int, command: Callable[[WorkerCommand], None]) -> None:
        """Starts without orders.

        Args:
            num_ranks: processes of the executor.
            command: sends a command to each.
        """
        self._num_ranks = num_ranks
        self._command = command
        self._num_orders = 0
        self._waiting: dict[int, _Reads] = {}

    async def read(self, path: str) -> AdapterRead:
        """Has all ranks read an adapter; the executor's `receive` must run meanwhile.

        Returns:
            The answer of the first rank that refused it, or else of rank 0.

        Raises:
            WorkerDiedError: the workers were stopped.
        """
        self._num_orders += 1
        order = ReadAdapter(order_id=self._num_orders, path=path)
        reads = self._waiting[order.order_id] = _Reads(self._num_ranks)
        self._command(WorkerCommand(read_adapter=order))
        try:
            return await reads.answer
        finally:
            del self._waiting[order.order_id]

    def forget(self, digest: bytes) -> None:
        """Frees the host memory of an adapter that no later step loads."""
        self._command(WorkerCommand(forget_adapter=ForgetAdapter(digest=digest)))

    def take(self, number: int, read: AdapterRead) -> None:
        """Takes a rank's answer."""
        if (reads := self._waiting.get(read.order_id)) is not None:
            reads.take(number, read)

    def fail(self) -> None:
        """Ends all waits: the workers are stopped."""
        for reads in self._waiting.values():
            reads.fail(WorkerDiedError("the worker was stopped"))


class _Reads:
    """The answers of all ranks to one order."""

    def __init__(self, num_ranks: int) -> None:
        self.answer: asyncio.Future[AdapterRead] = asyncio.get_running_loop().create_future()
        self._num_ranks = num_ranks
        self._reads: dict[int, AdapterRead] = {}

    def take(self, number: int, read: AdapterRead) -> None:
        """Takes the answer of a rank; the last one decides."""
        self._reads[number] = read
        if len(self._reads) < self._num_ranks or self.answer.done():
            return
        reads = [each for _, each in sorted(self._reads.items())]
        first = next((each for each in reads if each.error), reads[0])
        if any(each.digest != first.digest for each in reads) and not first.error:
            first.error = "ranks have read different files"
        self.answer.set_result(first)

    def fail(self, error: WorkerDiedError) -> None:
        """Ends the wait."""
        if not self.answer.done():
            self.answer.set_exception(error)
