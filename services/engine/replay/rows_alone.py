"""Steps of one row each, out of a step of several rows."""

from collections.abc import Sequence

import numpy as np

from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    FallbackReason,
    SpecDecodeMetadata,
    StepImage,
    StepResult,
    pack_int32,
    read_int32,
)
from services.engine.limits import StepLimits


def rows_alone(step: BatchDescriptor) -> list[BatchDescriptor]:
    """Returns the steps that compute each row of a step without graphs, in order.

    The first assigns all rows, updates all block tables and copies all states.
    """
    starts = read_int32(step.attn_metadata.query_start_loc)
    sampled = read_int32(step.sampling.sample_indices).tolist()
    steps = [_row(step, index, starts, sampled) for index in range(len(starts) - 1)]
    steps[0].row_assignments.extend(step.row_assignments)
    steps[0].encoded_images.extend(step.encoded_images)
    if step.attn_metadata.HasField("block_table_updates"):
        updates = step.attn_metadata.block_table_updates
        steps[0].attn_metadata.block_table_updates.CopyFrom(updates)
    if step.HasField("state_metadata"):
        steps[0].state_metadata.CopyFrom(step.state_metadata)
    return steps


def chunk_of(row: int, start: int, end: int, limits: StepLimits) -> BatchDescriptor:
    """Returns the step that computes tokens of one row without sampling."""
    builder = BatchBuilder()
    builder.row_ids.append(row)
    builder.q_lens.append(end - start)
    builder.seq_lens.append(end)
    if limits.num_speculative_tokens:
        builder.drafts = SpecDecodeMetadata(
            num_spec_steps=limits.num_speculative_tokens,
            num_next_drafts=limits.num_speculative_tokens,
            num_draft_tokens=pack_int32([0]),
        )
    return builder.build(
        step_id=0,
        is_prefill=True,
        graph_key=None,
        fallback_reason=FallbackReason.FALLBACK_REASON_ENFORCE_EAGER,
    )


def joined(results: Sequence[StepResult]) -> StepResult:
    """Returns the result of a step from those of its rows."""
    whole = StepResult()
    whole.CopyFrom(results[0])
    for field in ("token_ids", "num_accepted_tokens", "draft_token_ids"):
        setattr(whole, field, b"".join(getattr(result, field) for result in results))
    return whole


def _row(
    step: BatchDescriptor, index: int, starts: np.typing.NDArray[np.int32], sampled: list[int]
) -> BatchDescriptor:
    q_len = int(starts[index + 1] - starts[index])
    seq_len = int(read_int32(step.attn_metadata.seq_lens)[index])
    alone = BatchDescriptor(
        step_id=step.step_id,
        cudagraph_runtime_mode=step.cudagraph_runtime_mode,
        fallback_reason=step.fallback_reason,
    )
    alone.context.is_prefill = step.context.is_prefill and q_len > 1
    alone.context.batch_size = 1
    alone.context.num_tokens = alone.context.max_q_len = q_len
    attention = alone.attn_metadata
    attention.query_start_loc = pack_int32([0, q_len])
    attention.seq_lens = pack_int32([seq_len])
    attention.row_ids = pack_int32([read_int32(step.attn_metadata.row_ids)[index]])
    attention.max_seqlen_q, attention.max_seqlen_k = q_len, seq_len
    alone.images.extend(
        StepImage(request=0, image=each.image, pages=each.pages)
        for each in step.images
        if each.request == index
    )
    _set_sampling(alone, step, index, sampled)
    if step.HasField("spec_decode_metadata"):
        drafts = step.spec_decode_metadata
        counts = read_int32(drafts.num_draft_tokens)
        first = int(counts[:index].sum())
        own = read_int32(drafts.draft_token_ids)[first : first + int(counts[index])]
        alone.spec_decode_metadata.num_spec_steps = drafts.num_spec_steps
        alone.spec_decode_metadata.num_next_drafts = drafts.num_next_drafts
        alone.spec_decode_metadata.num_draft_tokens = pack_int32([counts[index]])
        alone.spec_decode_metadata.draft_token_ids = pack_int32(own)
    return alone


def _set_sampling(
    alone: BatchDescriptor, step: BatchDescriptor, index: int, sampled: list[int]
) -> None:
    whole, sampling = step.sampling, alone.sampling
    sampling.all_greedy = whole.all_greedy
    sampling.needs_logit_edits = whole.needs_logit_edits
    sampling.needs_logprobs = whole.needs_logprobs
    if index not in sampled:
        return
    sampling.sample_indices = pack_int32([0])
    grammar_rows = read_int32(whole.grammar_rows).tolist()
    if sampled.index(index) in grammar_rows:
        at = grammar_rows.index(sampled.index(index))
        size = len(whole.grammar_masks) // len(grammar_rows)
        sampling.grammar_rows = pack_int32([0])
        sampling.grammar_masks = whole.grammar_masks[at * size : (at + 1) * size]
