"""Log-probabilities of prompt tokens, for requests that want to know them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.sampling.logprobs import Logprobs, compute_logprobs
from services.engine.worker.inputs.step_arrays import Int32Array, StepArrays
from services.engine.worker.inputs.transfer import to_device

SLICE_ROWS = 128
"""Positions whose logits exist at a time: for 150,000 tokens in float32 they take 77 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPositions:
    """The N query tokens of a step behind which a known prompt token follows.

    hidden: [N] int64, where among the step's query tokens each is. rows, columns: [N] int64, where
    in the token table the token behind it is.
    """

    hidden: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def read(
        cls, arrays: StepArrays, requests: Int32Array, num_prompt_tokens: Int32Array
    ) -> "PromptPositions":
        """Finds them.

        Args:
            arrays: the step's.
            requests: [P], indices of the requests that want to know.
            num_prompt_tokens: [R], of each request of the step.

        Raises:
            ValueError: a request is not in the step.
        """
        if not 0 <= requests.min() <= requests.max() < len(arrays.seq_lens):
            raise ValueError("the step's descriptor is invalid: prompt requests outside the batch")
        hidden, rows, columns = [], [], []
        for request in requests.tolist():
            first, last = arrays.query_start_loc[request : request + 2].tolist()
            start = int(arrays.seq_lens[request]) - (last - first)
            count = max(0, min(last - first, int(num_prompt_tokens[request]) - 1 - start))
            hidden.append(np.arange(first, first + count))
            rows.append(np.full(count, arrays.row_ids[request], np.int64))
            columns.append(np.arange(start + 1, start + 1 + count))
        return cls(
            hidden=np.concatenate(hidden),
            rows=np.concatenate(rows),
            columns=np.concatenate(columns),
        )


def prompt_logprobs(
    positions: PromptPositions,
    *,
    hidden: Tensor,
    tokens: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    num_top: int,
    slice_rows: int,
) -> Logprobs:
    """Returns the log-probability of each prompt token, and the most likely ones in its place.

    Args:
        positions: N of them.
        hidden: [T, hidden], of the step's query tokens.
        tokens: [R, L] int32, the token table.
        compute_logits: maps hidden states [n, hidden] to logits [n, V].
        num_top: how many of the most likely tokens.
        slice_rows: most positions whose logits may exist at a time.
    """
    device = hidden.device
    places = to_device(positions.hidden, device)
    targets = tokens[to_device(positions.rows, device), to_device(positions.columns, device)].long()
    slices = []
    for start in range(0, len(places), slice_rows):
        at, target = places[start : start + slice_rows], targets[start : start + slice_rows]
        logits = compute_logits(hidden.index_select(0, at))
        slices.append(compute_logprobs(logits, target, num_top))
    return joined(slices)


def joined(slices: Sequence[Logprobs]) -> Logprobs:
    """Returns log-probabilities of several slices as one."""
    return Logprobs(
        chosen=torch.cat([each.chosen for each in slices]),
        top_token_ids=torch.cat([each.top_token_ids for each in slices]),
        top=torch.cat([each.top for each in slices]),
    )
