"""Batches for paged attention whose requests share leading blocks."""

from dataclasses import replace

import torch

from models.kernels.attention.configurations import most_prefix_rows
from models.ops.attention.attention_metadata import build_attention_metadata
from services.engine.batch import SharedPrefixes, pack_int32
from services.engine.worker.inputs.prefix_plan import PlannedPrefixes, PrefixBuffers
from tests.support.attention_case import token_request


def with_shared(case, prefixes):
    """Returns a case whose requests share blocks, with the plan of it.

    prefixes: (requests, blocks) each, outer ones before those inside; the requests have the blocks
        before their queries.
    """
    metadata = case.metadata
    for requests, num_blocks in prefixes:
        leader, *others = requests
        metadata.block_tables[others, :num_blocks] = metadata.block_tables[leader, :num_blocks]
    device, num_requests = case.q.device, len(metadata.seq_lens)
    members = [each for requests, _ in prefixes for each in requests]
    num_queries = int(metadata.query_start_loc.diff()[members].max()) if members else 1
    buffers = PrefixBuffers(num_requests + 1, device, num_queries=num_queries)
    buffers.write(planned(case, prefixes))
    workspace = metadata.workspace
    if workspace is not None:
        num_rows = most_prefix_rows(case.q.shape[1], case.k.shape[1], device)
        workspace = replace(
            workspace,
            prefix_partials=torch.full((num_rows * case.q.shape[2],), torch.nan, device=device),
            prefix_lse=torch.full((num_rows,), torch.nan, device=device),
        )
    with buffers.building_kernels():
        plan = buffers.plan(metadata.seq_lens)
    num_tokens = int(metadata.query_start_loc[-1])
    metadata = build_attention_metadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        row_ids=metadata.row_ids,
        block_table=metadata.block_tables,
        positions=case.positions[:num_tokens],
        token_request=token_request(metadata.query_start_loc),
        block_size=case.cache.k.shape[1],
        max_seqlen_q=metadata.max_seqlen_q,
        max_seqlen_k=metadata.max_seqlen_k,
        chunks=metadata.chunks,
        workspace=workspace,
        prefix_plan=plan,
    )
    return replace(case, metadata=metadata)


def planned(case, prefixes):
    """Returns the plan that a worker makes of prefixes, as with_shared has them."""
    return PlannedPrefixes.read(
        SharedPrefixes(
            requests=pack_int32([each for requests, _ in prefixes for each in requests]),
            counts=pack_int32([len(requests) for requests, _ in prefixes]),
            num_blocks=pack_int32([num_blocks for _, num_blocks in prefixes]),
        ),
        query_start_loc=case.metadata.query_start_loc.cpu().numpy(),
        seq_lens=case.metadata.seq_lens.cpu().numpy(),
        block_size=case.cache.k.shape[1],
        most_queries=64,
    )
