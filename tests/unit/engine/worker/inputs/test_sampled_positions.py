"""The device works out of carried requests what the host finds once results are back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.attention.attention_metadata import build_attention_metadata
from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    FallbackReason,
    SpecDecodeMetadata,
    StepResult,
    pack_int32,
    read_int32,
)
from services.engine.limits import StepLimits
from services.engine.spec_decode.carried_drafts import CarriedDrafts
from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.input_buffers import InputBuffers
from services.engine.worker.inputs.sampled_positions import SampledPositions

NUM_DRAFTS = 3
NUM_BLOCKS = 500
COLUMNS = torch.arange(NUM_DRAFTS + 1, dtype=torch.int32)


@st.composite
def requests(draw):
    """A request of a step: its tokens before the last step, and what that step brought."""
    num_verified = draw(st.integers(0, NUM_DRAFTS))
    return {
        "length": draw(st.integers(1, 40)),
        "num_verified": num_verified,
        "num_accepted": draw(st.integers(0, num_verified)),
        "num_drafts": draw(st.integers(0, NUM_DRAFTS)),
        "drafts": draw(st.lists(st.integers(0, 96), min_size=NUM_DRAFTS, max_size=NUM_DRAFTS)),
    }


def descriptor(rows, q_lens, lengths, counts, token_ids=(), carried=(), *, prompt=None):
    """Returns a step of requests that sample, and of a prompt's part that does not."""
    builder = BatchBuilder()
    builder.row_ids += rows
    builder.q_lens += q_lens
    builder.seq_lens += lengths
    builder.sample_indices += range(len(rows))
    if prompt is not None:
        builder.row_ids.append(prompt)
        builder.q_lens.append(4)
        builder.seq_lens.append(4)
        counts = [*counts, 0]
    builder.drafts = SpecDecodeMetadata(
        draft_token_ids=pack_int32(list(token_ids)),
        num_spec_steps=NUM_DRAFTS,
        num_next_drafts=NUM_DRAFTS,
        num_draft_tokens=pack_int32(counts),
        carried_requests=pack_int32(list(carried)),
    )
    return builder.build(
        step_id=1,
        is_prefill=prompt is not None,
        graph_key=None,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSUPPORTED,
    )


def gathered(buffers, limits, step):
    """Returns all that a forward pass and sampling read of a step."""
    batch = Batch.read(step, limits, num_blocks=NUM_BLOCKS)
    header = buffers.write(batch)
    inputs = buffers.gather_batch(batch)
    at = SampledPositions.of(header, COLUMNS)
    metadata = build_attention_metadata(
        query_start_loc=inputs.query_start_loc,
        seq_lens=inputs.seq_lens,
        row_ids=inputs.row_ids,
        block_table=buffers.block_table,
        positions=inputs.positions,
        token_request=inputs.token_request,
        block_size=limits.block_size,
        max_seqlen_q=inputs.max_seqlen_q,
        max_seqlen_k=inputs.max_seqlen_k,
    )
    found = {
        "input_ids": inputs.input_ids,
        "positions": inputs.positions,
        "seq_lens": inputs.seq_lens,
        "slots": metadata.slot_mapping,
        "sampled": at.positions,
        "rows": at.row_ids,
        "drafts": at.drafts(buffers.tokens),
    }
    return batch, {name: each.tolist() for name, each in found.items()}


@settings(max_examples=150, deadline=None)
@given(
    made=st.lists(requests(), min_size=1, max_size=5),
    block_size=st.sampled_from([4, 5, 8, 16]),
    has_prompt=st.booleans(),
    data=st.data(),
)
def test_lengths_slots_tokens_and_drafts_follow_from_the_rows(made, block_size, has_prompt, data):
    count = len(made)
    limits = StepLimits(
        max_num_seqs=count + 1,
        max_num_batched_tokens=64,
        max_model_len=64,
        block_size=block_size,
        vocab_size=97,
        num_speculative_tokens=NUM_DRAFTS,
    )
    buffers = InputBuffers(limits, torch.device("cpu"))
    table = buffers.block_table
    table.copy_(1 + torch.randperm(table.numel()).view(table.shape) % (NUM_BLOCKS - 1))
    rows = data.draw(st.permutations(range(count + 1)))
    rows, spare = list(rows[:count]), rows[count]

    def of(name):
        return [each[name] for each in made]

    verified, accepted = np.array(of("num_verified")), np.array(of("num_accepted"))
    last = descriptor(
        rows,
        (verified + 1).tolist(),
        (np.array(of("length")) + verified).tolist(),
        verified.tolist(),
        [9] * int(verified.sum()),
    )
    # The last step leaves lengths, newest tokens and drafts in the rows.
    header = buffers.write(Batch.read(last, limits, num_blocks=NUM_BLOCKS))
    at = SampledPositions.of(header, COLUMNS)
    lengths = at.known_lengths(torch.from_numpy(accepted))
    assert lengths.tolist() == [e["length"] + e["num_accepted"] + 1 for e in made]
    buffers.keep_lengths(at.row_ids[:, 0], lengths)
    buffers.tokens[:, :60] = torch.randint(97, (count + 2, 60))
    for row, length, drafts in zip(rows, lengths.tolist(), of("drafts"), strict=True):
        buffers.tokens[row, length : length + NUM_DRAFTS] = torch.tensor(drafts).int()

    counts, carried = of("num_drafts"), [i for i in range(count) if data.draw(st.booleans())]
    known = [
        int(length) + (verified[i] - accepted[i] if i in carried else 0)
        for i, length in enumerate(lengths)
    ]
    named = [t for i, e in enumerate(made) if i not in carried for t in e["drafts"][: counts[i]]]
    ordered = descriptor(
        rows,
        [n + 1 for n in counts],
        [int(length + n) for length, n in zip(known, counts, strict=True)],
        counts,
        named,
        carried,
        prompt=spare if has_prompt else None,
    )
    complete = BatchDescriptor.FromString(ordered.SerializeToString())
    mirror = CarriedDrafts(max_num_seqs=count + 1, num_drafts=NUM_DRAFTS)
    mirror.complete(
        last,
        StepResult(
            num_accepted_tokens=pack_int32(accepted), draft_token_ids=pack_int32(of("drafts"))
        ),
    )
    nothing = StepResult(
        num_accepted_tokens=pack_int32([0] * count),
        draft_token_ids=pack_int32([[0] * NUM_DRAFTS] * count),
    )
    mirror.complete(complete, nothing)

    batch, found = gathered(buffers, limits, ordered)
    _, expected = gathered(buffers, limits, complete)
    assert found == expected
    assert found["drafts"] == [
        e["drafts"][:n] + [NO_DRAFT] * (NUM_DRAFTS - n) for e, n in zip(made, counts, strict=True)
    ]
    sampled = np.array(found["sampled"])
    assert bool((batch.drafts.least_positions <= sampled).all())
    assert bool((sampled <= batch.drafts.positions).all())
    assert not complete.spec_decode_metadata.carried_requests
    assert complete.attn_metadata.max_seqlen_k == read_int32(complete.attn_metadata.seq_lens).max()


@pytest.mark.parametrize(
    ("q_lens", "counts", "carried", "found"),
    [
        ([3, 3], [2, 2], [1, 0], "do not ascend"),
        ([3, 3], [2, 2], [2], "out of the batch"),
        ([3, 4], [2, 2], [1], "other tokens than its newest and its drafts"),
    ],
)
def test_carried_requests_that_contradict_the_step_are_refused(q_lens, counts, carried, found):
    limits = StepLimits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, vocab_size=97,
        num_speculative_tokens=NUM_DRAFTS,
    )  # fmt: skip
    order = descriptor([0, 1], q_lens, [9, 9], counts, [1, 1], carried)
    with pytest.raises(ValueError, match=found):
        Batch.read(order, limits, num_blocks=NUM_BLOCKS)


def test_a_carried_request_samples():
    limits = StepLimits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, vocab_size=97,
        num_speculative_tokens=NUM_DRAFTS,
    )  # fmt: skip
    order = descriptor([0], [1], [9], [0], [], [0])
    order.sampling.sample_indices = b""
    with pytest.raises(ValueError, match="carried request that does not sample"):
        Batch.read(order, limits, num_blocks=NUM_BLOCKS)
