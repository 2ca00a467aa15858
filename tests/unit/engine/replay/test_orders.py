"""Which graph a recorded step runs by when it is replayed."""

import pytest

from services.engine.batch import (
    BatchBuilder,
    CUDAGraphMode,
    FallbackReason,
    GraphKey,
    GraphKind,
    read_int32,
)
from services.engine.replay.cache_content import BlockNumbers
from services.engine.replay.orders import Orders
from services.engine.replay.recording import ReplayError

NONE = CUDAGraphMode.CUDA_GRAPH_MODE_NONE
FULL = CUDAGraphMode.CUDA_GRAPH_MODE_FULL
PIECEWISE = CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE


def decode_key(size):
    return GraphKey(num_tokens=size, graph_bs=size, max_q_len=1, kind=GraphKind.GRAPH_KIND_DECODE)


def pieces_key(size):
    return GraphKey(
        num_tokens=size, graph_bs=size, max_q_len=size, kind=GraphKind.GRAPH_KIND_PIECEWISE
    )


def descriptor(*q_lens, key=None, block_ids=()):
    builder = BatchBuilder()
    for row, q_len in enumerate(q_lens):
        builder.row_ids.append(row)
        builder.q_lens.append(q_len)
        builder.seq_lens.append(q_len)
    if block_ids:
        builder.update_blocks(0, 0, block_ids)
    return builder.build(
        step_id=1,
        is_prefill=max(q_lens) > 1,
        graph_key=key,
        fallback_reason=FallbackReason.FALLBACK_REASON_UNSUPPORTED,
    )


def make_orders(against, *catalogue, allows=lambda key: True):
    blocks = BlockNumbers(100)
    blocks.use(descriptor(1, block_ids=[70, 7]).attn_metadata.block_table_updates.block_ids)
    return Orders(against, catalogue, blocks, allows=allows)


def test_a_graph_that_was_recorded_in_the_mode_is_used_again():
    orders = make_orders("full", decode_key(4))
    order = orders.order(descriptor(1, 1, 1, key=decode_key(8)))
    assert order.graph_key == order.tested[0].graph_key == decode_key(8)
    assert order.tested[0].cudagraph_runtime_mode == FULL


def test_a_recorded_graph_that_cannot_be_captured_here_gives_way_to_the_catalogue():
    orders = make_orders("full", decode_key(4), allows=lambda key: key.graph_bs < 8)
    recorded = descriptor(1, 1, 1, key=decode_key(8))
    assert orders.graph_key(recorded) == decode_key(4)


def test_a_whole_graph_of_a_step_with_prompts_is_used_again():
    key = GraphKey(num_tokens=16, graph_bs=8, max_q_len=16, kind=GraphKind.GRAPH_KIND_MIXED)
    assert make_orders("full").graph_key(descriptor(5, 1, key=key)) == key


def test_other_steps_get_the_smallest_graph_of_the_catalogue():
    orders = make_orders("full", decode_key(2), decode_key(4))
    for recorded in (descriptor(1, 1, 1), descriptor(1, 1, 1, key=pieces_key(16))):
        assert orders.graph_key(recorded) == decode_key(4)
    orders = make_orders("piecewise", pieces_key(8), pieces_key(16))
    assert orders.graph_key(descriptor(5, 1, 3)) == pieces_key(16)
    assert orders.graph_key(descriptor(1, key=decode_key(1))) == pieces_key(8)


@pytest.mark.parametrize(
    ("against", "recorded"),
    [
        ("full", descriptor(1, 1, 1)),
        ("full", descriptor(5)),
        ("eager", descriptor(1, key=decode_key(1))),
    ],
)
def test_steps_without_a_graph_run_eagerly_on_both_sides(against, recorded):
    catalogue = [decode_key(2)] if against == "full" else []
    order = make_orders(against, *catalogue).order(recorded)
    assert order.graph_key is None
    for side in (order.reference, *order.tested):
        assert side.cudagraph_runtime_mode == NONE
        assert not side.HasField("graph_key")


def test_the_reference_runs_no_graph_and_both_sides_use_renumbered_blocks():
    recorded = descriptor(1, key=decode_key(1), block_ids=[7, 70])
    order = make_orders("full").order(recorded)
    assert order.reference.cudagraph_runtime_mode == NONE
    assert order.tested[0].cudagraph_runtime_mode == FULL
    for side in (order.reference, *order.tested):
        block_ids = side.attn_metadata.block_table_updates.block_ids
        assert read_int32(block_ids).tolist() == [1, 2]
    assert read_int32(recorded.attn_metadata.block_table_updates.block_ids).tolist() == [7, 70]


def test_a_block_that_the_engine_did_not_have_is_refused():
    with pytest.raises(ReplayError, match="names block 100 of 100 blocks"):
        BlockNumbers(100).use(
            descriptor(1, block_ids=[100]).attn_metadata.block_table_updates.block_ids
        )
