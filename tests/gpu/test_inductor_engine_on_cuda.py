"""Inductor through the worker process and gRPC: tuned sizes, graphs, cold and from disk."""

import pytest

from tests.support.inductor_engine import (
    NUM_OUTPUT,
    PROMPTS,
    serve_compiled,
    write_served_checkpoint,
)
from tests.support.step_driver import greedy_continuation

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1000)]

SIZES = [1, 4, 64]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, write_served_checkpoint(folder)


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise", "full"])
def test_tuned_sizes_serve_what_eager_would_cold_and_from_disk(checkpoint, tmp_path, mode):
    folder, reference = checkpoint
    expected = [greedy_continuation(reference, prompt, NUM_OUTPUT) for prompt in PROMPTS]
    flags = {
        "device": "cuda",
        "compile_cache_dir": tmp_path / "pieces",
        "compile_sizes": [1, 4],
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": SIZES,
    }
    for is_warm in (False, True):
        served = serve_compiled(folder, **flags)
        assert served.alone == expected[0]
        assert served.together == expected
        # Each kind of piece is compiled for any number of tokens, for 1 and for 4.
        num_distinct = served.compiled["num_distinct"]
        assert num_distinct % 3 == 0
        assert num_distinct >= 9
        # Some pieces may consist of our operators alone.
        num_compiled = num_distinct - served.compiled["num_without_code"]
        assert num_compiled >= 6
        assert served.compiled["num_loaded"] == (num_compiled if is_warm else 0)
        assert served.stats.num_late_builds == 0
        assert not any(graph.fault for graph in served.stats.graphs)
        if mode == "none":
            assert not served.stats.graphs
        else:
            assert set(served.stats.graph_dispatch) == {"graph"}


def test_background_compilation_ends_in_compiled_graphs(checkpoint, tmp_path):
    folder, reference = checkpoint
    expected = [greedy_continuation(reference, prompt, NUM_OUTPUT) for prompt in PROMPTS]
    served = serve_compiled(
        folder,
        device="cuda",
        compile_cache_dir=tmp_path / "pieces",
        cudagraph_capture_sizes=SIZES,
        capture_while_serving=True,
    )
    assert served.alone == expected[0]
    assert served.together == expected
