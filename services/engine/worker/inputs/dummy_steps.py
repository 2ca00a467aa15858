"""Steps of requests that are nobody's, to compute with at any time.

They write to the null block alone, and what they write does not depend on their order.
"""

import numpy as np

from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.step_arrays import StepLimits

MAX_DUMMY_KEYS = 2**18
"""Requests times tokens of the longest, of a step of decodes.

A large batch leaves each sequence to few programs: a step of 256 requests of up to 40,960 tokens
keeps the device busy for 64 ms (H200, Qwen3-8B, 2026-11).
"""


def dummy_decodes(
    limits: StepLimits,
    *,
    batch_size: int,
    q_len: int,
    row_id: int,
    variant: int,
    max_keys: int = MAX_DUMMY_KEYS,
) -> Batch:
    """Returns requests that bring `q_len` tokens each, some as long as can be.

    Two of different length never share a slot.

    Args:
        limits: the worker's.
        batch_size: how many there are.
        q_len: query tokens of each.
        row_id: the row of all of them, which holds no block.
        variant: another one has other lengths.
        max_keys: requests times tokens of the longest, if that leaves it a block.
    """
    block_size, max_model_len = limits.block_size, limits.max_model_len
    # Where the last token of each goes; those before it take the slots down to the next one.
    slots = np.arange(q_len - 1, min(block_size, max_model_len), q_len)
    max_full_blocks = min(limits.max_blocks_per_seq - 1, max_keys // (batch_size * block_size))
    halvings = np.minimum(np.arange(len(slots)) + variant, 31)
    num_full_blocks = np.minimum(
        max_full_blocks >> halvings, (max_model_len - 1 - slots) // block_size
    )
    lengths = num_full_blocks * block_size + slots + 1
    chosen = (np.arange(batch_size) + variant) % len(slots)
    starts = np.arange(batch_size + 1) * q_len
    return dummy_batch(starts, lengths[chosen], row_id, is_prefill=False)


def dummy_prompts(limits: StepLimits, *, num_tokens: int, row_id: int, variant: int) -> Batch:
    """Returns chunks of prompts, all the same, that have so many tokens as far as there are rows.

    Args:
        limits: the worker's.
        num_tokens: of all of them.
        row_id: the row of all of them, which holds no block.
        variant: 0: they begin their sequences; 1: they stand behind a block of other tokens.
    """
    q_len = min(limits.block_size, limits.max_model_len, num_tokens)
    batch_size = min(num_tokens // q_len, limits.max_num_seqs)
    seq_len = min(q_len + variant * limits.block_size, limits.max_model_len)
    starts = np.arange(batch_size + 1) * q_len
    return dummy_batch(starts, np.full(batch_size, seq_len), row_id, is_prefill=True)


def dummy_chunks(
    limits: StepLimits, *, num_tokens: int, max_requests: int, row_id: int, variant: int
) -> Batch:
    """Returns chunks of prompts that have so many tokens together.

    If blocks suffice for them they are those of `dummy_prompts`, with the rest of the tokens in a
    shorter one. Otherwise all begin their sequences, so that none reads what others overwrite.

    Args:
        limits: the worker's.
        num_tokens: of all of them; what they cannot hold is left out.
        max_requests: how many there may be.
        row_id: the row of all of them, which holds no block.
        variant: 0: as few as can be, beginning their sequences; 1: behind a block of other tokens,
            or of other lengths.
    """
    q_len = min(limits.block_size, limits.max_model_len)
    if num_tokens <= max_requests * q_len:
        num_cached = min(variant * limits.block_size, limits.max_model_len - q_len)
    else:
        q_len = min(limits.max_model_len, -(-num_tokens // (max_requests if variant else 1)))
        num_cached = 0
    starts = np.minimum(np.arange(max_requests + 1) * q_len, num_tokens)
    q_lens = np.diff(starts)
    q_lens = q_lens[q_lens > 0]
    return dummy_batch(starts[: len(q_lens) + 1], q_lens + num_cached, row_id, is_prefill=True)


def dummy_batch(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, row_id: int, *, is_prefill: bool
) -> Batch:
    """Returns a batch of requests in one row, of which none samples."""
    return Batch(
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        row_ids=np.full(len(seq_lens), row_id, np.int32),
        sample_indices=np.empty(0, np.int32),
        num_tokens=int(query_start_loc[-1]),
        max_seqlen_q=int(np.diff(query_start_loc).max()),
        max_seqlen_k=int(seq_lens.max()),
        is_prefill=is_prefill,
    )
