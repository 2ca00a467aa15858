"""Orders to all ranks to read adapters, and their answers. No torch here."""

from protos.engine.v1.worker_pb2 import AdapterRead, ForgetAdapter, ReadAdapter, WorkerCommand
from services.engine.worker.rank_orders import RankAnswers


class AdapterOrders(RankAnswers[AdapterRead]):
    """Has the ranks of one executor read and forget adapters, beside their steps."""

    async def read(self, path: str) -> AdapterRead:
        """Has all ranks read an adapter; the executor's `receive` must run meanwhile.

        Returns:
            The answer of the first rank that refused it, or else of rank 0.

        Raises:
            WorkerDiedError: the workers were stopped.
        """
        reads = await self.of(
            lambda order_id: self._command(
                WorkerCommand(read_adapter=ReadAdapter(order_id=order_id, path=path))
            )
        )
        first = next((each for each in reads if each.error), reads[0])
        if any(each.digest != first.digest for each in reads) and not first.error:
            first.error = "ranks have read different files"
        return first

    def forget(self, digest: bytes) -> None:
        """Frees the host memory of an adapter that no later step loads."""
        self._command(WorkerCommand(forget_adapter=ForgetAdapter(digest=digest)))
