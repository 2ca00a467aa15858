"""Builds the attention metadata of a step from the worker's tables."""

import sys
from collections.abc import Sequence

import torch

from models.batch_invariance import is_batch_invariant
from models.forward_context import (
    AttentionGroup,
    AttentionMetadata,
    AttentionWorkspace,
    PrefixPlan,
    PromptChunk,
)
from models.kernels.attention.configurations import (
    MAX_LATENT_PARTIALS,
    MAX_PARTIALS,
    MAX_TILE_PARTS,
    ROWS_OF_TILE,
    most_few_rows,
    most_prefix_rows,
)
from models.kernels.gpu import has_kernels
from models.kv_cache import KVCacheSpec, LatentCacheSpec, RowCacheSpec, TokenSpec

CPU_GROUP_KEYS = 4096
"""Most key positions that single-token requests gather in one call on a CPU.

Gathered keys then stay in the CPU's cache: 64 requests of 1024 tokens took 130 ms in one call a
layer and 35 ms in calls of this size (4 layers, 1 thread, fp32).
"""


def build_attention_metadata(  # noqa: PLR0913  # a bundle of these would be the result itself
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row_ids: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    token_request: torch.Tensor,
    block_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    chunks: tuple[PromptChunk, ...] = (),
    workspace: AttentionWorkspace | None = None,
    is_recorded: bool = False,
    block_stride: int = 1,
    prefix_plan: PrefixPlan | None = None,
) -> AttentionMetadata:
    """Gathers block ids and cache slots of a step and splits it into attention groups.

    All tensors are on the model's device. With our kernels the host reads nothing back; the
    reference reads query_start_loc and seq_lens once. Arguments without a line here are fields of
    AttentionMetadata.

    block_table: [rows, max_blocks] int32, the worker's whole table, padded with block 0.
    positions: [T] int64, each query token's position in its sequence.
    token_request: [T] int32 or int64, the request of each query token.
    block_size: tokens in one block.
    is_recorded: a captured graph will repeat this with other content of the same tensors, so the
        host reads nothing, and max_seqlen_k must hold for all replays.
    block_stride: of the layers' KVCacheData.
    """
    num_blocks = _num_blocks(max_seqlen_k, block_size)
    block_tables = block_table[:, :num_blocks].index_select(0, row_ids)
    if block_stride > 1:
        block_tables = block_tables * block_stride
    groups: list[AttentionGroup] = []
    if has_kernels(block_table.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.attention.cache import slot_mapping as kernel

        # Batch-invariant attention reads all keys from the cache, those of dummy requests too.
        slot_mapping = kernel.slot_mapping(
            block_tables, token_request, positions, block_size,
            keeps_null_block=is_batch_invariant(),
        )  # fmt: skip
    else:
        slot_mapping = _slot_mapping(block_tables, token_request, positions, block_size)
        if is_recorded and len(positions) == len(seq_lens) * max_seqlen_q:
            groups = [_uniform_group(0, max_seqlen_q, block_tables, seq_lens, block_size)]
        elif is_recorded:
            # Lengths vary, so each token is a request of its own.
            tables = block_tables.index_select(0, token_request)
            groups = [_uniform_group(0, 1, tables, positions + 1, block_size)]
        else:
            groups = _split(query_start_loc.tolist(), seq_lens, block_tables, block_size)
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        row_ids=row_ids,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        groups=tuple(groups),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        chunks=chunks,
        workspace=workspace,
        prefix_plan=prefix_plan,
    )


def build_state_metadata(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    row_ids: torch.Tensor,
    pages: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> AttentionMetadata:
    """Gathers the pages of a step's states; the other arguments are fields of AttentionMetadata.

    pages: [rows, P] int32, the blocks of each row's state.
    """
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        row_ids=row_ids,
        block_tables=pages.index_select(0, row_ids),
        slot_mapping=row_ids[:0],
        groups=(),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def make_attention_workspace(
    specs: Sequence[TokenSpec], *, device: torch.device, shares_prefixes: bool = False
) -> AttentionWorkspace | None:
    """Returns the workspace of decode kernels that split long sequences; None without kernels.

    One serves all layers and steps of a model, on one stream. shares_prefixes: some have plans of
    shared prefixes.
    """
    spec = specs[0]
    if not has_kernels(device) or isinstance(spec, RowCacheSpec):
        return None
    prefix_rows = 0
    if isinstance(spec, LatentCacheSpec):
        num_partials, size = MAX_LATENT_PARTIALS * spec.num_heads, spec.latent_dim
    else:
        heads = [each for each in specs if isinstance(each, KVCacheSpec)]
        num_partials = MAX_PARTIALS * max(each.num_heads // each.num_kv_heads for each in heads)
        if not is_batch_invariant():
            num_partials = max(num_partials, MAX_TILE_PARTS * ROWS_OF_TILE, most_few_rows(device))
        size = max(each.head_dim for each in heads)
        if shares_prefixes:
            prefix_rows = max(
                most_prefix_rows(each.num_heads, each.num_kv_heads, device) for each in heads
            )
    return AttentionWorkspace(
        partials=torch.empty(num_partials * size, dtype=torch.float32, device=device),
        # Batch-invariant attention keeps the highest score and the sum apart.
        lse=torch.empty(
            num_partials * (2 if is_batch_invariant() else 1), dtype=torch.float32, device=device
        ),
        counters=torch.zeros(MAX_PARTIALS, dtype=torch.int32, device=device),
        prefix_partials=(
            torch.empty(prefix_rows * size, dtype=torch.float32, device=device)
            if prefix_rows
            else None
        ),
        prefix_lse=(
            torch.empty(prefix_rows, dtype=torch.float32, device=device) if prefix_rows else None
        ),
    )


def _slot_mapping(
    block_tables: torch.Tensor,
    token_request: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    block_index = positions.div(block_size, rounding_mode="floor")
    at_block = token_request * block_tables.shape[1] + block_index
    token_blocks = block_tables.view(-1).index_select(0, at_block)
    return token_blocks * block_size + (positions - block_index * block_size)


def _split(
    starts: list[int], seq_lens: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> list[AttentionGroup]:
    """Groups neighbouring single-token requests; every longer chunk is a group of its own.

    Requests without query tokens are skipped.
    """
    lengths = seq_lens.tolist()
    max_keys = CPU_GROUP_KEYS if block_tables.device.type == "cpu" else sys.maxsize
    groups = []
    request = 0
    while request < len(lengths):
        start, num_queries = starts[request], starts[request + 1] - starts[request]
        if num_queries == 1:
            end, num_blocks = _single_token_run(starts, lengths, request, max_keys, block_size)
            tables = block_tables[request:end, :num_blocks]
            groups.append(_uniform_group(start, 1, tables, seq_lens[request:end], block_size))
            request = end
        elif num_queries == 0:
            request += 1
        else:
            table = block_tables[request]
            groups.append(_chunk_group(start, num_queries, lengths[request], table, block_size))
            request += 1
    return groups


def _single_token_run(
    starts: list[int], lengths: list[int], first: int, max_keys: int, block_size: int
) -> tuple[int, int]:
    """Returns the end of the run of single-token requests from `first`, and its blocks per request.

    A run's requests are padded to the longest; together they have at most max_keys positions.
    """
    end, num_blocks = first, 1  # a dummy row of length 0 still gathers the null block
    while end < len(lengths) and starts[end + 1] - starts[end] == 1:
        blocks = max(num_blocks, _num_blocks(lengths[end], block_size))
        if end > first and blocks * block_size * (end + 1 - first) > max_keys:
            break
        end, num_blocks = end + 1, blocks
    return end, num_blocks


def _uniform_group(
    first_token: int,
    num_queries: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
) -> AttentionGroup:
    """Returns the group of requests with equally many query tokens; the last one sees all keys."""
    num_requests, num_blocks = block_tables.shape
    keys = torch.arange(num_blocks * block_size, device=block_tables.device)
    num_later = torch.arange(num_queries - 1, -1, -1, device=block_tables.device)
    # A dummy row has no tokens; seeing one key keeps its softmax finite.
    num_seen = (seq_lens[:, None] - num_later).clamp(min=1)
    return AttentionGroup(
        first_token=first_token,
        num_requests=num_requests,
        num_queries=num_queries,
        block_ids=block_tables.reshape(-1),
        mask=(keys < num_seen[:, :, None])[:, None],
    )


def _chunk_group(
    first_token: int, num_queries: int, seq_len: int, block_table: torch.Tensor, block_size: int
) -> AttentionGroup:
    """Returns the group of one request's chunk: each query sees the keys up to its own."""
    num_blocks = _num_blocks(seq_len, block_size)
    keys = torch.arange(num_blocks * block_size, device=block_table.device)
    queries = torch.arange(seq_len - num_queries, seq_len, device=block_table.device)
    mask = keys <= queries.unsqueeze(1)
    return AttentionGroup(
        first_token=first_token,
        num_requests=1,
        num_queries=num_queries,
        block_ids=block_table[:num_blocks],
        mask=mask[None, None],
    )


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
