"""Log-probabilities of prompt tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import read_int32
from services.engine.sampling.logprobs import Logprobs, compute_logprobs
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import Int32Array
from services.engine.worker.inputs.transfer import to_device

SLICE_ROWS = 128
"""Positions whose logits exist at a time: for 150,000 tokens in float32 they take 77 MB."""


def prompt_logprobs(
    batch: Batch,
    num_prompt_tokens: Int32Array,
    *,
    hidden: Tensor,
    tokens: Tensor,
    compute_logits: Callable[[Tensor, Tensor | None], Tensor],
    adapter_slots: Tensor | None,
    slice_rows: int,
) -> Logprobs:
    """Returns the log-probability of each known prompt token that follows one of the step's.

    Args:
        batch: the step, with the requests that ask and the most likely tokens to list.
        num_prompt_tokens: [R], of each request of the step.
        hidden: [T, hidden], of the step's query tokens.
        tokens: [R, L] int32, the token table.
        compute_logits: maps hidden states [n, hidden] and slots [n] to logits [n, V].
        adapter_slots: [at least T] int32, the slot of each token's adapter; None without any.
        slice_rows: most positions whose logits may exist at a time.

    Raises:
        ValueError: a request is not in the step.
    """
    requests = read_int32(batch.sampling.prompt_logprob_requests)
    num_top, device = batch.sampling.num_prompt_logprobs, hidden.device
    columns = _followed_by_prompt(batch, requests, num_prompt_tokens)
    at, rows, positions = (to_device(column, device) for column in columns)
    targets = tokens[rows, positions].long()
    slices = []
    for start in range(0, len(at), slice_rows):
        each, target = at[start : start + slice_rows], targets[start : start + slice_rows]
        slots = None if adapter_slots is None else adapter_slots.index_select(0, each)
        logits = compute_logits(hidden.index_select(0, each), slots)
        slices.append(compute_logprobs(logits, target, num_top))
    return joined(slices)


def joined(slices: Sequence[Logprobs]) -> Logprobs:
    """Concatenates the log-probabilities of slices."""
    return Logprobs(
        chosen=torch.cat([each.chosen for each in slices]),
        top_token_ids=torch.cat([each.top_token_ids for each in slices]),
        top=torch.cat([each.top for each in slices]),
    )


def _followed_by_prompt(
    batch: Batch, requests: Int32Array, num_prompt_tokens: Int32Array
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the N query tokens that another prompt token follows.

    Returns:
        [N] int64 each: their indices in the step, and the row and the column of the following
        token in the token table.

    Raises:
        ValueError: a request is not in the step.
    """
    if not 0 <= requests.min() <= requests.max() < len(batch.seq_lens):
        raise ValueError("the step's descriptor is invalid: prompt requests outside the batch")
    found, rows, columns = [], [], []
    for request in requests.tolist():
        first, last = batch.query_start_loc[request : request + 2].tolist()
        start = int(batch.seq_lens[request]) - (last - first)
        count = max(0, min(last - first, int(num_prompt_tokens[request]) - 1 - start))
        found.append(np.arange(first, first + count))
        rows.append(np.full(count, batch.row_ids[request], np.int64))
        columns.append(np.arange(start + 1, start + 1 + count))
    return np.concatenate(found), np.concatenate(rows), np.concatenate(columns)
