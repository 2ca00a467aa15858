import pytest
import torch

from models.forward_context import (
    AttentionMetadata,
    Context,
    ForwardContext,
    forward_context,
    get_forward_context,
)


def make_context() -> ForwardContext:
    empty = torch.empty(0)
    shape = Context(positions=empty, is_prefill=False, batch_size=0, num_tokens=0, max_q_len=0)
    metadata = AttentionMetadata(
        query_start_loc=empty,
        seq_lens=empty,
        row_ids=empty,
        block_tables=empty,
        slot_mapping=empty,
        groups=(),
        max_seqlen_q=0,
        max_seqlen_k=0,
    )
    return ForwardContext(context=shape, attn_metadata=metadata, kv_cache_data=[])


def test_layers_see_the_context_of_their_forward_pass():
    context = make_context()
    with forward_context(context):
        assert get_forward_context() is context


def test_no_context_is_seen_outside_a_forward_pass():
    with forward_context(make_context()):
        pass
    with pytest.raises(RuntimeError, match="no forward context is set"):
        get_forward_context()


def test_nested_forward_passes_are_refused_and_leave_the_first_in_place():
    context = make_context()
    with forward_context(context):
        with pytest.raises(RuntimeError, match="do not nest"), forward_context(make_context()):
            pass
        assert get_forward_context() is context


def fail_in_a_forward_pass():
    with forward_context(make_context()):
        raise ValueError("a layer failed")


def test_failed_forward_pass_leaves_no_context():
    with pytest.raises(ValueError, match="a layer failed"):
        fail_in_a_forward_pass()
    with pytest.raises(RuntimeError, match="no forward context"):
        get_forward_context()
