"""The slot of each token's adapter, at a constant address."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from models.forward_context import GraphKey
from services.engine.batch import RowAssignment
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import require
from services.engine.worker.inputs.transfer import overwrite


class AdapterSlots:
    """Slots of rows, on the host, and of the present step's tokens, on the device.

    memory: [tokens] int32, as ForwardContext.adapter_slots.
    """

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device) -> None:
        """Starts without adapters; num_rows: the dummy row is one."""
        self.memory = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self._rows = np.zeros(num_rows, np.int32)
        self._are_used = False
        self._has_some = False
        self._builds_kernels = False

    @contextmanager
    def building_kernels(self) -> Iterator[None]:
        """Runs steps with adapters for the length of the block, whatever they use."""
        self._builds_kernels = True
        try:
            yield
        finally:
            self._builds_kernels = False

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Takes the slots of rows that requests take."""
        for each in assignments:
            self._rows[each.row] = each.adapter_slot

    def has_any(self, batch: Batch) -> bool:
        """Returns whether a request of a step has an adapter."""
        return bool(self._rows[batch.row_ids].any())

    def write(self, batch: Batch, key: GraphKey | None = None) -> None:
        """Writes the slots of a step's tokens; padding has none.

        Raises:
            ValueError: a request has an adapter and the step's graph adds none.
        """
        if key is not None and key.skips_adapters:
            require(not self.has_any(batch), "an adapter in a graph of steps without any")
            # Also of a rank that has given its graph up, as the others replay theirs.
            self._are_used = False
            if self._has_some:
                self.memory.zero_()  # graphs of drafts read it after any step
                self._has_some = False
            return
        # Data-parallel ranks do not know whether others have adapters.
        self._are_used = self.has_any(batch) or batch.num_tokens_across_dp is not None
        num_tokens = max(batch.num_rows, 0 if key is None else key.num_tokens)
        slots = np.zeros(num_tokens, np.int32)
        slots[: batch.num_tokens] = np.repeat(
            self._rows[batch.row_ids], np.diff(batch.query_start_loc)
        )
        overwrite(self.memory[:num_tokens], slots)
        self._has_some = self._has_some or bool(slots.any())

    def of_step(self, key: GraphKey | None = None) -> Tensor | None:
        """Returns what the layers of the present step read; None for a step without adapters.

        key: the graph that is recorded or replayed.
        """
        is_read = self._are_used or self._builds_kernels
        if key is not None:
            is_read = not key.skips_adapters
        return self.memory if is_read else None
