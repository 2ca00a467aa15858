"""Orders that every rank answers, such as those between two steps. No torch here."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from protos.engine.v1.worker_pb2 import OrderAnswer, WorkerCommand
from services.engine.worker.rank_process import WorkerDiedError


class Answer(Protocol):
    """A rank's answer to an order."""

    @property
    def order_id(self) -> int:
        """The order."""


AnswerT = TypeVar("AnswerT", bound=Answer)


class RankAnswers(Generic[AnswerT]):
    """Collects each rank's answer to the orders of one kind."""

    def __init__(self, num_ranks: int, command: Callable[[WorkerCommand], None]) -> None:
        """Starts without orders.

        Args:
            num_ranks: processes of the executor.
            command: sends a command to each.
        """
        self._command = command
        self._num_ranks = num_ranks
        self._num_orders = 0
        self._answers: dict[int, dict[int, AnswerT]] = {}
        self._waiting: dict[int, asyncio.Future[list[AnswerT]]] = {}

    async def of(self, send: Callable[[int], None]) -> list[AnswerT]:
        """Sends an order; returns the answers of all ranks, in their order.

        Args:
            send: sends it, with the id that it has in answers.

        Raises:
            WorkerDiedError: the workers were stopped.
        """
        self._num_orders += 1
        order_id = self._num_orders
        self._answers[order_id] = {}
        waiting: asyncio.Future[list[AnswerT]] = asyncio.get_running_loop().create_future()
        self._waiting[order_id] = waiting
        try:
            send(order_id)
            return await waiting
        finally:
            del self._answers[order_id], self._waiting[order_id]

    def take(self, number: int, answer: AnswerT) -> None:
        """Takes a rank's answer."""
        answers = self._answers.get(answer.order_id)
        if answers is None:
            return
        answers[number] = answer
        waiting = self._waiting[answer.order_id]
        if len(answers) == self._num_ranks and not waiting.done():
            waiting.set_result([each for _, each in sorted(answers.items())])

    def fail(self) -> None:
        """Ends all waits: the workers are stopped."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerDiedError("the worker was stopped"))


class RankOrders(RankAnswers[OrderAnswer]):
    """Has all ranks of one executor carry out commands at the same place among their steps."""

    async def run(self, command: WorkerCommand) -> list[OrderAnswer]:
        """Sends a command, to which this gives an id; the executor's `receive` must run meanwhile.

        Returns:
            The answer of each rank, in their order.

        Raises:
            WorkerDiedError: the workers were stopped.
        """

        def send(order_id: int) -> None:
            command.order_id = order_id
            self._command(command)

        return await self.of(send)
