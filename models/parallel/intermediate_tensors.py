"""The hidden states that one pipeline stage hands to the next."""

from collections import deque

import torch
import torch.distributed as dist

from models.parallel.collectives import begin_send, finish, receive_into
from models.parallel.group import PipelineStage

STAGE_BEFORE = "stage_before"
"""Name of the group of a rank and the one that it receives from."""
STAGE_AFTER = "stage_after"
"""Name of the group of a rank and the one that it sends to."""


class IntermediateTensors:
    """The buffer that a stage receives into, and its messages on their way, outside of graphs.

    received: [max_num_tokens, hidden], at a constant address, which graphs read; None on the first
        stage.
    """

    def __init__(
        self,
        stage: PipelineStage,
        *,
        max_num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self.received: torch.Tensor | None = None
        if not stage.is_first:
            self.received = torch.zeros(max_num_tokens, hidden_size, dtype=dtype, device=device)
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def receive(self, num_tokens: int, *, num_padded: int) -> None:
        """Receives the hidden states of a step's tokens; the padding after them becomes zero.

        Padding from an earlier step could hold NaN, which would reach the null block.
        """
        if self.received is None:
            return
        receive_into(self.received[:num_tokens], STAGE_BEFORE)
        if num_padded > num_tokens:
            self.received[num_tokens:num_padded].zero_()

    def send(self, hidden: torch.Tensor) -> None:
        """Begins to send hidden states [T, hidden], which may be overwritten afterwards."""
        # There are as many steps in flight as stages, so the oldest has long arrived.
        if len(self._sending) >= self._stage.size:
            oldest, _ = self._sending.popleft()
            finish(oldest)
        sent = hidden.clone(memory_format=torch.contiguous_format)
        work = begin_send(sent, STAGE_AFTER)
        if work is not None:
            self._sending.append((work, sent))
