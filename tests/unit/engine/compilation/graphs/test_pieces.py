"""Steps in pieces around attention, as graphs, on a CPU.

At level 3 the pieces are the compiler's, without Inductor; at levels 0 and 2 the model is captured
around its attention as it runs.
"""

import pytest

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import CUDAGraphMode as WireMode
from services.engine.batch import FallbackReason
from services.engine.config.compilation_level import CompilationLevel
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

PROMPTS = [[5, 17, 3], [44, 2, 9, 9, 31, 60, 7, 8, 1, 90], [12], [5, 17, 3, 8, 8], [70] * 17]
NUM_OUTPUT = 8


@pytest.fixture(scope="module")
def expected(folder):
    return GraphEngine(folder, compilation_config()).run(PROMPTS, NUM_OUTPUT)


@pytest.fixture(params=[0, 2, 3])
def level(request):
    return CompilationLevel(request.param)


def engine_in(folder, level, mode, *sizes):
    config = compilation_config(
        level=level,
        use_inductor=False,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
    )
    return GraphEngine(folder, config)


def modes(engine):
    return {descriptor.cudagraph_runtime_mode for descriptor, _ in engine.steps}


def test_pieces_give_the_tokens_of_eager_steps_whatever_the_batch(folder, expected, level):
    engine = engine_in(folder, level, CUDAGraphMode.PIECEWISE, 4, 16, 64)
    assert [outcome.fault for outcome in engine.capture()] == [""] * 3
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert modes(engine) == {WireMode.CUDA_GRAPH_MODE_PIECEWISE}
    assert sum(figures.padded_tokens for figures in engine.ledger.figures) > 0


def test_whole_graphs_serve_decodes_and_pieces_the_rest(folder, expected, level):
    engine = engine_in(folder, level, CUDAGraphMode.FULL_AND_PIECEWISE, 4, 8, 64)
    assert [outcome.fault for outcome in engine.capture()] == [""] * 5
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert modes(engine) == {WireMode.CUDA_GRAPH_MODE_PIECEWISE, WireMode.CUDA_GRAPH_MODE_FULL}


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL])
def test_without_padding_steps_run_a_graph_of_their_size_or_none(folder, expected, mode):
    config = compilation_config(
        cudagraph_mode=mode, cudagraph_capture_sizes=(2, 8, 36), cudagraph_padding=False
    )
    engine = GraphEngine(folder, config)
    assert {outcome.fault for outcome in engine.capture()} == {""}
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert {figures.padded_tokens for figures in engine.ledger.figures} == {0}
    assert set(engine.reasons) == {
        FallbackReason.FALLBACK_REASON_UNSPECIFIED,
        FallbackReason.FALLBACK_REASON_NO_EXACT_SIZE,
    }


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_graphs_that_read_copies_serve_inputs_that_moved(folder, expected, level, mode):
    config = compilation_config(
        level=level,
        use_inductor=False,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=(4, 64),
        cudagraph_copy_inputs=True,
    )
    engine = GraphEngine(folder, config)
    assert {outcome.fault for outcome in engine.capture()} == {""}
    if mode is CUDAGraphMode.PIECEWISE:
        buffers = engine.runner.buffers
        buffers._positions = buffers._positions.clone()
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert set(engine.reasons) == {FallbackReason.FALLBACK_REASON_UNSPECIFIED}


def test_a_piece_whose_argument_moved_is_given_up_and_tokens_stay_right(folder, expected, level):
    engine = engine_in(folder, level, CUDAGraphMode.PIECEWISE, 64)
    engine.capture()
    buffers = engine.runner.buffers
    buffers._positions = buffers._positions.clone()
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    (figures,) = engine.ledger.figures
    assert "when captured" in figures.fault
    assert set(engine.reasons) == {FallbackReason.FALLBACK_REASON_QUARANTINED}


def test_a_step_longer_than_every_graph_falls_back(folder, expected, level):
    engine = engine_in(folder, level, CUDAGraphMode.PIECEWISE, 4, 8)
    engine.capture()
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
    assert FallbackReason.FALLBACK_REASON_OVERSIZE in engine.reasons


def test_pieces_of_other_ranges_have_no_graph_of_a_size(folder, expected):
    config = compilation_config(
        level=3,
        use_inductor=False,
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        cudagraph_capture_sizes=(4, 16, 64),
        compile_ranges=[8],
    )
    engine = GraphEngine(folder, config)
    assert [outcome.fault for outcome in engine.capture()] == [""] * 3
    assert engine.run(PROMPTS, NUM_OUTPUT) == expected
