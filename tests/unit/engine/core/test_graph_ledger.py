"""The engine's record of its worker's graphs, and the catalogue of the dispatcher."""

from structlog.testing import capture_logs

from protos.engine.v1.worker_pb2 import GraphReport, GraphState, WorkerReady
from services.engine.batch import (
    BatchDescriptor,
    CUDAGraphMode,
    EncoderRun,
    FallbackReason,
    GraphKey,
    GraphKind,
    ordered_mode,
    step_result,
)
from services.engine.core.graph_ledger import GraphLedger
from services.engine.scheduler.dispatcher import BatchShape


def full(graph_bs):
    return GraphKey(
        num_tokens=graph_bs, graph_bs=graph_bs, max_q_len=1, kind=GraphKind.GRAPH_KIND_DECODE
    )


def captured(key):
    return GraphReport(
        key=key, state=GraphState.GRAPH_STATE_CAPTURED, capture_s=0.5, num_bytes=1024
    )


def provisional(key):
    return GraphReport(
        key=key, state=GraphState.GRAPH_STATE_PROVISIONAL, capture_s=0.1, num_bytes=10
    )


def given_up(key):
    return GraphReport(key=key, state=GraphState.GRAPH_STATE_QUARANTINED, fault="planted")


def dispatch(ledger, batch_size):
    shape = BatchShape(num_tokens=batch_size, batch_size=batch_size, max_q_len=1)
    return ledger.dispatcher.dispatch(shape)


def step(ledger, batch_size):
    """A step as the scheduler would order it."""
    found = dispatch(ledger, batch_size)
    descriptor = BatchDescriptor(
        graph_key=found.graph_key,
        cudagraph_runtime_mode=ordered_mode(found.graph_key),
        fallback_reason=found.fallback_reason,
    )
    descriptor.context.num_tokens = descriptor.context.batch_size = batch_size
    return descriptor


def test_a_worker_without_graphs_says_why():
    reason = FallbackReason.FALLBACK_REASON_ENFORCE_EAGER
    assert dispatch(GraphLedger(WorkerReady(no_graphs_reason=reason)), 1).fallback_reason == reason
    silent = GraphLedger(WorkerReady())
    assert dispatch(silent, 1).fallback_reason == FallbackReason.FALLBACK_REASON_UNSUPPORTED


def test_graphs_are_used_as_they_come_and_no_more_once_given_up():
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4), full(8)], graphs=[]))
    assert dispatch(ledger, 3).fallback_reason == FallbackReason.FALLBACK_REASON_UNCAPTURED
    ledger.take(captured(full(8)))
    assert dispatch(ledger, 3).graph_key == full(8)
    ledger.take(captured(full(4)))
    assert dispatch(ledger, 3).graph_key == full(4)
    ledger.take(given_up(full(4)))
    assert dispatch(ledger, 3).graph_key == full(8)
    ledger.take(given_up(full(8)))
    found = dispatch(ledger, 3)
    assert ordered_mode(found.graph_key) == CUDAGraphMode.CUDA_GRAPH_MODE_NONE
    assert found.fallback_reason == FallbackReason.FALLBACK_REASON_QUARANTINED
    assert dispatch(ledger, 9).fallback_reason == FallbackReason.FALLBACK_REASON_OVERSIZE


def test_replays_and_padding_are_booked_by_graph():
    ledger = GraphLedger(
        WorkerReady(
            planned_graphs=[full(4), full(8)], graphs=[captured(full(4)), captured(full(8))]
        )
    )
    result = step_result(1, [])
    for batch_size in (3, 4, 5):
        ledger.count(step(ledger, batch_size), result)
    figures = [(f.key.graph_bs, f.num_replays, f.padded_tokens) for f in ledger.figures]
    assert figures == [(8, 1, 3), (4, 2, 1)]
    assert [(f.capture_s, f.num_bytes) for f in ledger.figures] == [(0.5, 1024)] * 2


def test_a_step_whose_graph_did_not_run_counts_as_what_the_worker_says():
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4)], graphs=[captured(full(4))]))
    reason = FallbackReason.FALLBACK_REASON_QUARANTINED
    assert ledger.count(step(ledger, 4), step_result(1, [], fallback_reason=reason)) == reason
    assert ledger.figures[0].num_replays == 0


def test_a_fault_stays_with_what_its_graph_had_cost():
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4)], graphs=[captured(full(4))]))
    ledger.take(given_up(full(4)))
    (figures,) = ledger.figures
    assert (figures.fault, figures.capture_s, figures.num_bytes) == ("planted", 0.5, 1024)


def test_the_end_of_captures_is_reported_once():
    planned = [full(4), full(8)]
    with capture_logs() as logs:
        ledger = GraphLedger(WorkerReady(planned_graphs=planned, graphs=[captured(full(8))]))
        assert logs == []
        ledger.take(given_up(full(4)))
        ledger.take(given_up(full(8)))
    complete = [line for line in logs if line["event"] == "graphs_complete"]
    assert [(line["num_captured"], line["num_planned"]) for line in complete] == [(1, 2)]


def test_a_provisional_graph_serves_and_counts_as_none_until_it_is_replaced():
    with capture_logs() as logs:
        ledger = GraphLedger(WorkerReady(planned_graphs=[full(4)]))
        ledger.take(provisional(full(4)))
        assert dispatch(ledger, 3).graph_key == full(4)
        ledger.count(step(ledger, 3), step_result(1, []))
        assert (ledger.figures, ledger.captured, logs) == ([], [], [])
        ledger.take(captured(full(4)))
    (figures,) = ledger.captured
    assert (figures.num_replays, figures.capture_s, figures.num_bytes) == (1, 0.5, 1024)
    assert [line["event"] for line in logs] == ["graphs_complete"]


def test_what_captures_cost_is_known_of_graphs_in_use():
    reports = [captured(full(8)), given_up(full(4))]
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4), full(8)], graphs=reports))
    assert (
        ledger.costs(GraphKind.GRAPH_KIND_DECODE),
        ledger.costs(GraphKind.GRAPH_KIND_PIECEWISE),
    ) == ({8: 1024}, {})


def test_graphs_of_the_encoder_are_counted_by_patches_and_never_dispatched():
    encoder = GraphKey(num_tokens=64, graph_bs=64, max_q_len=64, kind=GraphKind.GRAPH_KIND_ENCODER)
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4), encoder]))
    ledger.take(captured(encoder))
    ledger.take(captured(full(4)))
    result = step_result(1, [])
    result.encoder_run.MergeFrom(EncoderRun(graph_key=encoder, num_images=2, num_patches=40))
    ledger.count(step(ledger, 3), result)
    decode, of_encoder = ledger.figures
    assert (decode.key, decode.num_replays) == (full(4), 1)
    assert (of_encoder.num_replays, of_encoder.padded_tokens) == (1, 24)
    assert of_encoder.is_encoder
    assert [each.key for each in ledger.captured] == [full(4)]
    shape = BatchShape(num_tokens=64, batch_size=64, max_q_len=1)
    assert ledger.dispatcher.dispatch(shape).graph_key is None


def test_graphs_of_drafting_are_counted_where_one_ran_and_never_dispatched():
    verify = GraphKey(num_tokens=24, graph_bs=8, max_q_len=3, kind=GraphKind.GRAPH_KIND_DECODE)
    drafting = GraphKey(num_tokens=24, graph_bs=8, max_q_len=3, kind=GraphKind.GRAPH_KIND_DRAFT)
    ledger = GraphLedger(WorkerReady(planned_graphs=[verify, drafting]))
    ledger.take(captured(drafting))
    shape = BatchShape(num_tokens=6, batch_size=2, max_q_len=3)
    reason = ledger.dispatcher.dispatch(shape).fallback_reason
    assert reason == FallbackReason.FALLBACK_REASON_UNCAPTURED
    ledger.take(captured(verify))
    found = ledger.dispatcher.dispatch(shape)
    assert found.graph_key == verify
    descriptor = BatchDescriptor(
        graph_key=verify, cudagraph_runtime_mode=ordered_mode(found.graph_key)
    )
    descriptor.context.num_tokens = 6
    result = step_result(1, [])
    ledger.count(descriptor, result)
    result.drafted_by_graph = True
    ledger.count(descriptor, result)
    ledger.take(given_up(drafting))
    assert ledger.dispatcher.dispatch(shape).graph_key == verify
    booked = [(each.key, each.num_replays, each.padded_tokens) for each in ledger.figures]
    assert booked == [(verify, 2, 36), (drafting, 1, 18)]
    assert (
        list(ledger.costs(GraphKind.GRAPH_KIND_DECODE)),
        ledger.costs(GraphKind.GRAPH_KIND_PIECEWISE),
    ) == ([24], {})


def test_graphs_of_steps_that_share_prefixes_are_counted_beside_those_planned():
    ledger = GraphLedger(WorkerReady(planned_graphs=[full(4)]))
    ledger.take(captured(full(4)))
    shared = GraphKey(shares_prefixes=True)
    shared.MergeFrom(full(4))
    assert ledger.num_planned == 1
    for _ in range(2):
        ledger.take(captured(shared))
        assert (ledger.num_planned, len(ledger.captured)) == (2, 2)
    assert ledger.costs(GraphKind.GRAPH_KIND_DECODE) == {4: 1024}
    assert dispatch(ledger, 3).graph_key == full(4)
    descriptor = step(ledger, 3)
    descriptor.attn_metadata.shared_prefixes.counts = b"\3\0\0\0"
    ledger.dispatcher.order_form(descriptor, has_adapters=True)
    ledger.count(descriptor, step_result(1, []))
    figures = {each.key.shares_prefixes: each.num_replays for each in ledger.figures}
    assert figures == {True: 1, False: 0}
    ledger.take(given_up(shared))
    assert [each.key for each in ledger.captured] == [full(4)]
