"""Batches of dummy requests that a worker may compute at any time.

They write only to the null block, and their results do not depend on the order of requests.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from services.engine.batch import BatchDescriptor, SpecDecodeMetadata, pack_int32
from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import (
    Batch,
    ordered_graph,
    read_sampling_across_dp,
    read_tokens_across_dp,
)

MAX_DUMMY_KEYS = 2**18
"""Bound of a dummy decode step's requests times the tokens of its longest sequence.

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
    """Returns decodes of `q_len` query tokens each, some as long as possible.

    Two requests of different length never share a slot.

    Args:
        limits: the worker's.
        batch_size: number of requests.
        q_len: query tokens of each.
        row_id: the row of all requests; it has no block.
        variant: selects the lengths.
        max_keys: bound of requests times the tokens of the longest; one block is always allowed.
    """
    block_size, max_model_len = limits.block_size, limits.max_model_len
    # The slot of each last token; the tokens before it take the slots down to the next one.
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
    """Returns equal chunks of prompts with `num_tokens` tokens, or as many as rows allow.

    Args:
        limits: the worker's.
        num_tokens: query tokens of all requests.
        row_id: the row of all requests; it has no block.
        variant: 0: the chunks begin their sequences; 1: they follow a block of other tokens.
    """
    q_len = min(limits.block_size, limits.max_model_len, num_tokens)
    batch_size = min(num_tokens // q_len, limits.max_num_seqs)
    seq_len = min(q_len + variant * limits.block_size, limits.max_model_len)
    starts = np.arange(batch_size + 1) * q_len
    return dummy_batch(starts, np.full(batch_size, seq_len), row_id, is_prefill=True)


def dummy_chunks(
    limits: StepLimits, *, num_tokens: int, max_requests: int, row_id: int, variant: int
) -> Batch:
    """Returns chunks of prompts that have `num_tokens` tokens together.

    If a block for each request suffices, they are the chunks of `dummy_prompts` and a shorter one
    with the remaining tokens. Otherwise all begin their sequences, so that no request reads slots
    that another one overwrites.

    Args:
        limits: the worker's.
        num_tokens: query tokens of all requests; tokens past their capacity are left out.
        max_requests: most requests.
        row_id: the row of all requests; it holds no block.
        variant: 0: as few requests as possible, which begin their sequences; 1: they follow a
            block of other tokens, or have other lengths.
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


def dummy_hidden(positions: Tensor, hidden_size: int) -> Tensor:
    """Returns hidden states [T, hidden], float32, of T dummy tokens.

    They depend only on positions [T]: requests of one length write the same keys to the same slots.
    """
    phases = torch.arange(hidden_size, dtype=torch.float32, device=positions.device)
    return (positions[:, None].float() + phases).sin_()


def idle_batch(descriptor: BatchDescriptor, limits: StepLimits) -> Batch:
    """Returns a step of one dummy request, for a data-parallel rank without requests.

    Raises:
        ValueError: the descriptor contradicts itself.
    """
    key = ordered_graph(descriptor)
    q_len = key.max_q_len if key is not None and key.kind is GraphKind.DECODE else 1
    batch = dummy_decodes(
        limits, batch_size=1, q_len=q_len, row_id=limits.max_num_seqs, variant=0, max_keys=0
    )
    batch = replace(
        batch,
        step_id=descriptor.step_id,
        graph_key=key,
        num_tokens_across_dp=read_tokens_across_dp(descriptor, limits),
        num_sampling_across_dp=read_sampling_across_dp(descriptor, limits),
    )
    metadata = SpecDecodeMetadata(num_draft_tokens=pack_int32([0]))
    metadata.MergeFrom(descriptor.spec_decode_metadata)
    return batch.with_drafts(metadata, limits)


def dummy_batch(
    query_start_loc: np.ndarray, seq_lens: np.ndarray, row_id: int, *, is_prefill: bool
) -> Batch:
    """Returns a batch of requests in one row, without sampling."""
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
