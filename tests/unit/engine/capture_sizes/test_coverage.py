"""Steps that the planned graphs cover, and the report for the operator."""

from structlog.testing import capture_logs

from services.engine.batch import GraphKey, GraphKind
from services.engine.capture_sizes.coverage import Coverage, GraphCoverage
from services.engine.capture_sizes.history import StepHistory
from services.engine.limits import StepLimits


def full(size):
    return GraphKey(num_tokens=size, graph_bs=size, max_q_len=1, kind=GraphKind.GRAPH_KIND_DECODE)


def pieces(size):
    return GraphKey(
        num_tokens=size, graph_bs=size, max_q_len=size, kind=GraphKind.GRAPH_KIND_PIECEWISE
    )


def history(decodes=None, others=None):
    return StepHistory(
        max_num_seqs=16, max_num_batched_tokens=100, decodes=decodes or {}, others=others or {}
    )


def limits(**options):
    return StepLimits(
        max_num_seqs=16,
        max_num_batched_tokens=100,
        max_model_len=100,
        block_size=4,
        vocab_size=97,
        **options,
    )


def logged(coverage, seen):
    with capture_logs() as logs:
        coverage.report(seen)
    return logs


def test_largest_share_and_largest_gap_of_one_kind():
    coverage = Coverage(sizes=[1, 4, 16], limit=64)
    assert (coverage.largest, coverage.share, coverage.max_padding) == (16, 0.25, 11)
    nothing = Coverage(sizes=[], limit=64)
    assert (nothing.largest, nothing.share, nothing.max_padding) == (0, 0.0, 0)
    assert Coverage(sizes=[3], limit=3).max_padding == 2


def test_decodes_run_as_pieces_where_whole_graphs_end():
    coverage = GraphCoverage.of([pieces(4), pieces(32), full(2), full(8)], limits())
    assert coverage.decodes == Coverage(sizes=[2, 8, 32], limit=16)
    assert coverage.others == Coverage(sizes=[4, 32], limit=100)
    only_pieces = GraphCoverage.of([pieces(4), pieces(32), pieces(100)], limits())
    assert only_pieces.decodes.sizes == [4, 32]
    assert only_pieces.others.sizes == [4, 32, 100]


def test_with_drafts_a_decode_has_several_tokens():
    verify = GraphKey(num_tokens=24, graph_bs=8, max_q_len=3, kind=GraphKind.GRAPH_KIND_DECODE)
    planned = [pieces(2), pieces(3), pieces(31), pieces(32), verify]
    coverage = GraphCoverage.of(planned, limits(num_speculative_tokens=2))
    assert coverage.decodes == Coverage(sizes=[8, 10], limit=16)
    only_pieces = GraphCoverage.of(planned[:-1], limits(num_speculative_tokens=2))
    assert only_pieces.decodes.sizes == [1, 10]


def test_a_gap_at_the_top_is_a_warning_and_the_figures_are_those_of_steps_seen_before():
    coverage = GraphCoverage.of([full(4), full(16), pieces(50)], limits())
    report, warning = logged(coverage, history({3: 6, 16: 2}, {25: 1, 80: 1}))
    assert report["event"] == "graph_coverage_reported"
    assert (report["decodes_up_to"], report["max_decodes"]) == (16, 16)
    assert (report["others_up_to"], report["max_num_batched_tokens"]) == (50, 100)
    assert (report["other_share"], report["other_max_padding"]) == (0.5, 49)
    assert (report["num_steps_seen"], report["expected_hit_rate"]) == (10, 0.9)
    assert report["expected_padding"] == round((6 + 25) / (6 * 4 + 2 * 16 + 50), 4)
    assert (warning["event"], warning["log_level"]) == ("graphs_do_not_cover_all_steps", "warning")
    assert (warning["steps"], warning["largest"], warning["limit"]) == ("others", 50, 100)


def test_steps_that_no_graph_is_meant_for_are_no_warning():
    coverage = GraphCoverage.of([full(16)], limits())
    (report,) = logged(coverage, history())
    assert report["num_steps_seen"] == 0
    assert "expected_hit_rate" not in report


def test_without_padding_only_steps_of_exactly_a_graphs_size_count_as_hits():
    coverage = GraphCoverage.of([full(8), full(4), pieces(32)], limits(), allows_padding=False)
    report, *_ = logged(coverage, history({3: 5, 4: 10, 8: 1}, {31: 4, 32: 4}))
    assert report["expected_hit_rate"] == round(15 / 24, 4)
    assert report["expected_padding"] == 0
    assert (report["decode_max_padding"], report["decode_share"]) == (0, round(3 / 16, 4))
