"""The hidden states that one pipeline stage hands to the next."""

import torch
import torch.distributed as dist

from models.parallel.collectives import begin_send, finish, receive_into
from models.parallel.group import PipelineStage

STAGE_BEFORE = "stage_before"
"""Name of the group of a rank and the one that it receives from."""
STAGE_AFTER = "stage_after"
"""Name of the group of a rank and the one that it sends to."""

NUM_OUTGOING = 2
"""Steps whose hidden states may be on their way: one is computed while another is sent."""


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
        def zeros() -> torch.Tensor:
            return torch.zeros(max_num_tokens, hidden_size, dtype=dtype, device=device)

        self.received = None if stage.is_first else zeros()
        num_outgoing = 0 if stage.is_last else NUM_OUTGOING
        self._outgoing = [zeros() for _ in range(num_outgoing)]
        self._sending: list[dist.Work | None] = [None] * num_outgoing
        self._turn = 0

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
        turn = self._turn
        self._turn = (turn + 1) % NUM_OUTGOING
        earlier = self._sending[turn]
        if earlier is not None:
            finish(earlier)
        sent = self._outgoing[turn][: len(hidden)].copy_(hidden)
        self._sending[turn] = begin_send(sent, STAGE_AFTER)
