"""Graph dispatch: a pure function of the catalogue and the batch's shape."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.batch import (
    BatchDescriptor,
    CUDAGraphMode,
    FallbackReason,
    GraphKey,
    GraphKind,
    ordered_mode,
)
from services.engine.scheduler.dispatcher import BatchShape, Dispatch, GraphDispatcher


def full(graph_bs: int, q_len: int = 1) -> GraphKey:
    return GraphKey(
        num_tokens=graph_bs * q_len,
        graph_bs=graph_bs,
        max_q_len=q_len,
        kind=GraphKind.GRAPH_KIND_DECODE,
    )


def piecewise(num_tokens: int) -> GraphKey:
    return GraphKey(
        kind=GraphKind.GRAPH_KIND_PIECEWISE,
        num_tokens=num_tokens,
        graph_bs=num_tokens,
        max_q_len=num_tokens,
    )


def prompts(num_tokens: int, graph_bs: int) -> GraphKey:
    return GraphKey(
        kind=GraphKind.GRAPH_KIND_MIXED,
        num_tokens=num_tokens,
        graph_bs=graph_bs,
        max_q_len=num_tokens,
    )


def test_whole_images_run_graphs_of_pieces_alone():
    shape = BatchShape(
        num_tokens=12, batch_size=2, max_q_len=8, sees_images=True, sees_whole_images=True
    )
    both = GraphDispatcher([prompts(16, 4), piecewise(64)])
    assert both.dispatch(shape).graph_key == piecewise(64)
    found = GraphDispatcher([prompts(16, 4)]).dispatch(shape)
    assert found.graph_key is None
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_UNSUPPORTED


CATALOGUE = [full(8), full(1), full(4), full(4, q_len=3), piecewise(64), piecewise(16)]


def dispatch(
    num_tokens: int, batch_size: int, max_q_len: int, catalogue: list[GraphKey] = CATALOGUE
) -> Dispatch:
    shape = BatchShape(num_tokens=num_tokens, batch_size=batch_size, max_q_len=max_q_len)
    return GraphDispatcher(catalogue).dispatch(shape)


def test_decodes_are_padded_to_the_next_full_graph():
    found = dispatch(2, 2, 1)
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_FULL
    assert found.graph_key == full(4)
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_UNSPECIFIED


def test_a_full_graph_of_the_exact_size_needs_no_padding():
    assert dispatch(8, 8, 1).graph_key == full(8)


def test_a_full_graph_serves_only_its_own_query_length():
    assert dispatch(9, 3, 3).graph_key == full(4, q_len=3)
    assert dispatch(6, 3, 2).graph_key == piecewise(16)


def test_mixed_batches_take_the_smallest_piecewise_graph_that_fits():
    found = dispatch(17, 3, 15)
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE
    assert found.graph_key == piecewise(64)


def test_mixed_batches_take_the_smallest_full_graph_with_room_for_tokens_and_requests():
    catalogue = [*CATALOGUE[:4], prompts(64, 63), prompts(64, 3), prompts(16, 2), prompts(16, 9)]
    found = dispatch(17, 3, 15, catalogue)
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_FULL
    assert found.graph_key == prompts(64, 3)
    assert dispatch(17, 4, 14, catalogue).graph_key == prompts(64, 63)
    assert dispatch(16, 2, 15, catalogue).graph_key == prompts(16, 2)
    assert dispatch(9, 3, 7, catalogue).graph_key == prompts(16, 9)
    assert dispatch(12, 10, 2, catalogue).graph_key == prompts(64, 63)
    assert dispatch(2, 2, 1, catalogue).graph_key == full(4)


def test_decodes_beyond_the_full_graphs_take_a_piecewise_one():
    assert dispatch(9, 9, 1).graph_key == piecewise(16)


def test_a_batch_beyond_every_graph_is_oversize():
    found = dispatch(65, 1, 65)
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_NONE
    assert found.graph_key is None
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_OVERSIZE
    decodes_only = dispatch(9, 9, 1, [full(8)])
    assert decodes_only.fallback_reason == FallbackReason.FALLBACK_REASON_OVERSIZE


def test_a_kind_of_batch_without_any_graph_is_uncaptured():
    found = dispatch(17, 3, 15, [full(8)])
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_UNCAPTURED


def test_without_graphs_every_batch_is_unsupported():
    found = dispatch(1, 1, 1, [])
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_NONE
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_UNSUPPORTED


def test_what_is_planned_but_not_there_yet_is_uncaptured():
    dispatcher = GraphDispatcher(planned=[full(8), full(4), piecewise(32)])
    shape = BatchShape(num_tokens=5, batch_size=5, max_q_len=1)
    uncaptured = FallbackReason.FALLBACK_REASON_UNCAPTURED
    assert dispatcher.dispatch(shape).fallback_reason == uncaptured
    dispatcher.capture(full(4))
    assert dispatcher.dispatch(shape).fallback_reason == uncaptured
    dispatcher.capture(full(8))
    assert dispatcher.dispatch(shape).graph_key == full(8)


def test_a_quarantined_graph_makes_room_for_the_next_larger_one_or_for_none():
    dispatcher = GraphDispatcher([full(8), full(4)])
    shape = BatchShape(num_tokens=3, batch_size=3, max_q_len=1)
    dispatcher.quarantine(full(4))
    assert dispatcher.dispatch(shape).graph_key == full(8)
    dispatcher.quarantine(full(8))
    quarantined = FallbackReason.FALLBACK_REASON_QUARANTINED
    assert dispatcher.dispatch(shape).fallback_reason == quarantined


@given(
    sizes=st.sets(st.integers(1, 40)),
    token_sizes=st.sets(st.integers(1, 80)),
    q_lens=st.lists(st.integers(1, 9), min_size=1, max_size=30),
)
def test_every_step_gets_the_smallest_graph_with_room_or_a_reason(sizes, token_sizes, q_lens):
    shape = BatchShape(num_tokens=sum(q_lens), batch_size=len(q_lens), max_q_len=max(q_lens))
    catalogue = [full(size) for size in sizes] + [piecewise(size) for size in token_sizes]
    found = GraphDispatcher(catalogue).dispatch(shape)
    whole = [size for size in sizes if size >= len(q_lens) and max(q_lens) == 1]
    pieces = [size for size in token_sizes if size >= sum(q_lens)]
    none = FallbackReason.FALLBACK_REASON_UNSPECIFIED
    if whole:
        assert (found.graph_key, found.fallback_reason) == (full(min(whole)), none)
        assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_FULL
    elif pieces:
        assert (found.graph_key, found.fallback_reason) == (piecewise(min(pieces)), none)
        assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE
    else:
        assert found.graph_key is None
        assert found.fallback_reason != none


def test_without_padding_only_graphs_of_exactly_the_size_run():
    catalogue = [full(8), full(4), prompts(16, 9), prompts(16, 2), piecewise(5)]
    dispatcher = GraphDispatcher(catalogue, planned=[full(2)], allows_padding=False)

    def found(num_tokens, batch_size, max_q_len):
        shape = BatchShape(num_tokens=num_tokens, batch_size=batch_size, max_q_len=max_q_len)
        return dispatcher.dispatch(shape)

    assert found(4, 4, 1).graph_key == full(4)
    assert found(5, 5, 1).graph_key == piecewise(5)
    assert found(16, 2, 9).graph_key == prompts(16, 2)
    assert found(16, 3, 9).graph_key == prompts(16, 9)
    assert found(16, 10, 2).graph_key is None
    assert found(3, 3, 1).fallback_reason == FallbackReason.FALLBACK_REASON_NO_EXACT_SIZE
    assert found(7, 2, 4).fallback_reason == FallbackReason.FALLBACK_REASON_NO_EXACT_SIZE
    assert found(2, 2, 1).fallback_reason == FallbackReason.FALLBACK_REASON_UNCAPTURED
    assert found(17, 2, 9).fallback_reason == FallbackReason.FALLBACK_REASON_OVERSIZE
    dispatcher.quarantine(full(4))
    assert found(4, 4, 1).fallback_reason == FallbackReason.FALLBACK_REASON_QUARANTINED
    assert found(3, 3, 1).fallback_reason == FallbackReason.FALLBACK_REASON_NO_EXACT_SIZE


def sharing(key: GraphKey) -> GraphKey:
    other = GraphKey(shares_prefixes=True)
    other.MergeFrom(key)
    return other


def test_a_step_with_shared_prefixes_runs_the_graph_of_its_size_that_reads_them():
    dispatcher = GraphDispatcher([full(8), full(4), prompts(16, 8)])

    def ordered(key, *, shares):
        descriptor = BatchDescriptor(graph_key=key)
        if shares:
            descriptor.attn_metadata.shared_prefixes.counts = b"\x04\0\0\0"
        dispatcher.order_form(descriptor, has_adapters=True)
        return descriptor.graph_key if descriptor.HasField("graph_key") else None

    assert ordered(full(4), shares=True) == full(4)
    dispatcher.capture(sharing(full(4)))
    dispatcher.capture(sharing(prompts(16, 8)))
    shape = BatchShape(num_tokens=4, batch_size=4, max_q_len=1)
    assert dispatcher.dispatch(shape).graph_key == full(4)
    for key in (full(4), prompts(16, 8)):
        assert ordered(key, shares=True) == sharing(key)
        assert ordered(key, shares=False) == key
    assert ordered(full(8), shares=True) == full(8)
    assert ordered(None, shares=True) is None
    dispatcher.quarantine(sharing(full(4)))
    assert ordered(full(4), shares=True) == full(4)
    assert dispatcher.dispatch(shape).graph_key == full(4)


def test_a_step_without_adapters_runs_the_graph_of_its_size_that_adds_none():
    dispatcher = GraphDispatcher([full(8), full(4)])

    def form(*, shares, has_adapters):
        descriptor = BatchDescriptor(graph_key=full(4))
        if shares:
            descriptor.attn_metadata.shared_prefixes.counts = b"\x04\0\0\0"
        dispatcher.order_form(descriptor, has_adapters=has_adapters)
        key = descriptor.graph_key
        assert key.graph_bs == 4
        return key.shares_prefixes, key.skips_adapters

    def capture(shares, skips):
        key = GraphKey(shares_prefixes=shares, skips_adapters=skips)
        key.MergeFrom(full(4))
        dispatcher.capture(key)
        return key

    assert form(shares=False, has_adapters=False) == (False, False)
    skipping = capture(False, True)
    assert form(shares=False, has_adapters=False) == (False, True)
    assert form(shares=False, has_adapters=True) == (False, False)
    capture(True, False)
    assert form(shares=True, has_adapters=False) == (False, True)
    assert form(shares=True, has_adapters=True) == (True, False)
    capture(True, True)
    assert form(shares=True, has_adapters=False) == (True, True)
    dispatcher.quarantine(skipping)
    assert form(shares=False, has_adapters=False) == (False, False)
