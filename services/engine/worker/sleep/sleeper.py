"""Orders to sleep and wake, at one rank."""

import time
from collections.abc import Callable

import structlog

from models.config_sections.fields import ConfigError
from models.loading.checkpoint import CheckpointError
from protos.engine.v1.worker_pb2 import OrderAnswer, WorkerCommand
from services.engine.worker.sleep.model_memory import ModelMemory

log = structlog.get_logger()


class Sleeper:
    """Carries out orders between steps, one after the other.

    All ranks get the same commands in the same order and sleep at the same place among them.
    """

    def __init__(self, memory: ModelMemory) -> None:
        """Starts awake."""
        self._memory = memory

    def sleep(
        self,
        order: WorkerCommand,
        *,
        receive: Callable[[], WorkerCommand | None],
        obey: Callable[[WorkerCommand], None],
        answer: Callable[[OrderAnswer], None],
    ) -> None:
        """Sleeps until an order to wake is carried out, or not at all if that is impossible.

        Args:
            order: to sleep, or to wake, which an awake worker answers.
            receive: returns the next command, or None to be called again.
            obey: carries out other commands. Captures, which run the model, follow after waking.
            answer: sends the answer to an order.
        """
        captures: list[WorkerCommand] = []
        answer(self._carry_out(order))
        while self._memory.is_asleep:
            command = receive()
            if command is None:
                continue
            if command.WhichOneof("command") in ("sleep", "wake"):
                answer(self._carry_out(command))
            elif command.HasField("capture"):
                captures.append(command)
            else:
                obey(command)
        for command in captures:
            obey(command)

    def _carry_out(self, order: WorkerCommand) -> OrderAnswer:
        started_s, kind = time.monotonic(), order.WhichOneof("command")
        try:
            if kind == "sleep":
                self._memory.sleep(order.sleep.level)
            else:
                self._memory.wake()
        except (MemoryError, CheckpointError, ConfigError) as error:
            log.warning("order_refused", order=kind, error=str(error))
            return OrderAnswer(order_id=order.order_id, error=str(error))
        num_bytes = self._memory.num_bytes
        took_s = round(time.monotonic() - started_s, 3)
        log.info("order_done", order=kind, num_bytes=num_bytes, took_s=took_s)
        return OrderAnswer(order_id=order.order_id, num_bytes=num_bytes)
