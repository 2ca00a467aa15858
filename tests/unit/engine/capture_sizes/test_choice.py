"""`auto` capture sizes are settled before they are sent to the worker."""

import pytest
from structlog.testing import capture_logs

from services.engine.capture_sizes.choice import with_planned_sizes
from services.engine.capture_sizes.history import history_path, load_history, save_history
from services.engine.config.engine_config import EngineConfig
from tests.support.engine_harness import engine_config

PIECES = {"compilation_level": 3, "cudagraph_mode": "full_and_piecewise"}


@pytest.fixture
def auto(tmp_path):
    def make(**changes):
        values = {"cudagraph_capture_sizes": "auto", "histogram_dir": str(tmp_path)}
        return engine_config(**{**values, **changes})

    return make


def remember(config, *, decodes=None, others=None):
    history = load_history(config)
    history.decodes, history.others = decodes or {}, others or {}
    save_history(history, history_path(config))


def sizes(config):
    settled = with_planned_sizes(config).compilation
    decodes = settled.capture_sizes(
        min(config.scheduler.max_num_seqs, config.max_num_batched_tokens)
    )
    return decodes, settled.piece_sizes(config.max_num_batched_tokens)


def test_each_kind_of_graph_gets_sizes_from_its_own_steps(auto):
    config = auto(cuda_graph_sizes=[16], **PIECES)
    remember(config, decodes={1: 500, 3: 500, 5: 500}, others={33: 900, 40: 100, 50: 1})
    # No more than the pattern has, and reaching as far: up to 8, and up to 64.
    assert sizes(config) == ((1, 3, 5, 8), (33, 40, 50, 64))


def test_the_pattern_stays_where_history_is_short(auto):
    config = auto(cuda_graph_sizes=[16], **PIECES)
    remember(config, decodes={3: 999}, others={33: 1000})
    with capture_logs() as logs:
        settled = sizes(config)
    assert settled == ((1, 2, 4, 8), (33, 64))
    assert [(line["event"], line["graphs"], line["num_steps"]) for line in logs] == [
        ("capture_sizes_not_planned", "decodes", 999),
        ("capture_sizes_planned", "pieces", 1000),
    ]


def test_without_history_auto_is_the_pattern(auto):
    config = auto(**PIECES)
    pattern = config.with_flags(cudagraph_capture_sizes=None)
    assert sizes(config) == sizes(pattern)
    unkept = auto(histogram_dir="", **PIECES)
    assert sizes(unkept) == sizes(pattern)


def test_pieces_that_decodes_run_in_too_are_planned_from_all_steps(auto):
    config = auto(cuda_graph_sizes=[4], compilation_level=3, cudagraph_mode="piecewise")
    remember(config, decodes={5: 600}, others={64: 600})
    assert sizes(config)[1] == (5, 64)


def test_given_piece_sizes_stay_beside_planned_decodes(auto):
    config = auto(cudagraph_piece_sizes=[7], cuda_graph_sizes=[16], **PIECES)
    remember(config, decodes={3: 1000}, others={33: 1000})
    assert sizes(config) == ((3, 8), (7,))


def test_limits_below_every_given_size_leave_nothing_to_plan(auto):
    config = auto(cuda_graph_sizes=[100, 200])
    remember(config, decodes={3: 1000})
    assert sizes(config) == ((), ())


def test_sizes_that_were_given_are_left_alone(auto):
    config = auto(cudagraph_capture_sizes=[1, 2])
    assert with_planned_sizes(config) is config


def test_a_settled_configuration_survives_the_way_to_the_worker(auto):
    config = auto(cuda_graph_sizes=[16])
    remember(config, decodes={3: 1000})
    settled = with_planned_sizes(config)
    assert EngineConfig.model_validate_json(settled.model_dump_json()) == settled
