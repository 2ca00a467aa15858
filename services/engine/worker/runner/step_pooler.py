"""Makes the vectors of the requests whose prompts a step completes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.layers.decoder import CausalLM
from models.layers.pooling import PoolingHead
from services.engine.batch import RowAssignment
from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.transfer import to_device
from services.engine.worker.runner.outputs import ForwardOutput, Sampled


class StepPooler:
    """Pools the hidden states of requests; keeps the sums of prompts computed in chunks.

    Sums are float64: those of bfloat16 states are exact, so chunks do not change a vector.
    """

    def __init__(
        self, model: CausalLM, head: PoolingHead, *, limits: StepLimits, device: torch.device
    ) -> None:
        self._model = model
        self._head = head
        self._sums: Tensor | None = None
        """[rows, hidden], the dummy row last; None where the last token's state is the vector."""
        if head.config.method != "last":
            shape = limits.max_num_seqs + 1, model.config.hidden_size
            self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Does nothing with new rows: the first chunk of a prompt overwrites the sum."""

    def sample(self, batch: Batch, output: ForwardOutput) -> Sampled:
        """Returns the vectors of the requests that are due."""
        hidden = output.hidden[: batch.num_tokens]
        states = self._last(batch, hidden) if self._sums is None else self._mean(batch, hidden)
        pooled = self._head(states, self._model.compute_logits) if len(states) else None
        return Sampled(token_ids=output.header.row_ids.new_empty(0), pooled=pooled)

    def _last(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Returns the states of the last tokens of due requests, [n, hidden]."""
        ends = batch.query_start_loc[batch.sample_indices + 1] - 1
        return hidden.index_select(0, to_device(ends, hidden.device))

    def _mean(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Adds the step's states to the sums; returns the means of due requests, [n, hidden].

        With method cls only the first token counts.
        """
        assert self._sums is not None, "the method sums states"
        device, q_lens = hidden.device, np.diff(batch.query_start_loc)
        starts = batch.seq_lens - q_lens
        is_mean = self._head.config.method == "mean"
        token_request = np.repeat(np.arange(len(q_lens)), q_lens)
        if not is_mean:
            counted = batch.query_start_loc[:-1][starts == 0]
            token_request = token_request[counted]
            hidden = hidden.index_select(0, to_device(counted, device))
        rows = to_device(batch.row_ids.astype(np.int64), device)
        is_later = to_device((starts > 0).astype(np.float64), device)
        sums = self._sums.index_select(0, rows) * is_later[:, None]
        sums.index_add_(0, to_device(token_request, device), hidden.double())
        self._sums.index_copy_(0, rows, sums)
        due = batch.sample_indices.astype(np.int64)
        counts = batch.seq_lens[due] if is_mean else np.ones(len(due))
        means = sums.index_select(0, to_device(due, device))
        return means / to_device(counts.astype(np.float64), device)[:, None]
