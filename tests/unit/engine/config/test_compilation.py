import pytest
from pydantic import ValidationError

from services.engine.config.compilation import CompilationConfig
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.engine_config import EngineConfig
from services.engine.config.flags import read_flags
from services.settings.flags import MAX_INT32


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((512,), 512, [1, 2, 4, 8, *range(16, 513, 16)]),
        ((512,), 2048, [1, 2, 4, 8, *range(16, 513, 16)]),
        ((512,), 100, [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 100]),
        ((512,), 3, [1, 2, 3]),
        ((4,), 512, [1, 2, 4]),
        ((40, 8), 512, [8, 40]),
        ((40, 8), 16, [8]),
    ],
)
def test_capture_sizes_follow_the_pattern_up_to_the_limit(sizes, limit, expected):
    assert list(CompilationConfig(cuda_graph_sizes=sizes).capture_sizes(limit)) == expected


def test_given_capture_sizes_win_and_are_put_in_order():
    config = CompilationConfig(cudagraph_capture_sizes=(8, 2, 8, 300))
    assert config.capture_sizes(256) == (2, 8)


def test_pieces_have_sizes_of_their_own_where_they_are_given():
    config = CompilationConfig(cudagraph_capture_sizes=(2, 8))
    assert config.piece_sizes(64) == (2, 8)
    config = CompilationConfig(cudagraph_capture_sizes=(2, 8), cudagraph_piece_sizes=(90, 7, 16))
    assert config.piece_sizes(64) == (7, 16)
    assert config.capture_sizes(64) == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--cudagraph-capture-sizes", "auto"], "auto"),
        (["--capture-sizes", "auto"], "auto"),
        (["--capture-sizes", "1,2"], [1, 2]),
        (["--cudagraph-capture-sizes", "1", "--cudagraph-capture-sizes", "2"], [1, 2]),
    ],
)
def test_sizes_are_read_from_the_command_line(arguments, expected):
    config = read_flags(EngineConfig, arguments)
    assert config.compilation.cudagraph_capture_sizes == expected


def test_auto_comes_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("OCTAVO_ENGINE_CUDAGRAPH_CAPTURE_SIZES", "auto")
    assert read_flags(EngineConfig, []).compilation.cudagraph_capture_sizes == "auto"


def test_specialised_sizes_take_capture_sizes_by_name():
    config = CompilationConfig(
        compilation_level=3,
        compile_sizes=(24, "cudagraph_capture_sizes", 9999),
        cudagraph_capture_sizes=(2, 8),
    )
    assert config.specialised_sizes(max_num_seqs=4, max_num_batched_tokens=64) == [2, 24]


def test_pieces_go_on_beyond_the_pattern_where_steps_may_be_longer():
    config = CompilationConfig(cuda_graph_sizes=(64,))
    decodes = (1, 2, 4, 8, 16, 32, 48, 64)
    assert config.capture_sizes(1000) == decodes
    assert config.piece_sizes(1000) == (*decodes, *range(72, 128, 8), *range(128, 257, 16))
    assert config.piece_sizes(100) == (*decodes, 72, 80, 88, 96, 100)
    assert config.piece_sizes(40) == config.capture_sizes(40)


def test_sizes_that_were_listed_are_taken_as_they_are():
    config = CompilationConfig(cudagraph_capture_sizes=(4, 64))
    assert config.piece_sizes(1000) == config.capture_sizes(1000) == (4, 64)


@pytest.mark.parametrize(
    ("flags", "device", "expected"),
    [
        ({}, "cpu", "NONE"),
        ({"compilation_level": 3}, "cpu", "NONE"),
        ({}, "cuda", "FULL"),
        ({"compilation_level": 3}, "cuda", "FULL"),
        ({"cudagraph_mode": "full_decode_only"}, "cuda", "FULL_DECODE_ONLY"),
        ({"compilation_level": 3, "enforce_eager": True}, "cuda", "NONE"),
    ],
)
def test_the_mode_follows_level_and_device(flags, device, expected):
    assert EngineConfig.from_flags(**flags).compilation.graph_mode(device).name == expected


def test_enforce_eager_wins_over_the_level():
    config = EngineConfig.from_flags(compilation_level=3, enforce_eager=True)
    assert config.compilation.level == CompilationLevel.NO_COMPILATION


@pytest.mark.parametrize(
    "flags",
    [
        {"compilation_level": 4},
        {"compilation_level": -1},
        {"splitting_ops": ["attention"]},
        {"cudagraph_capture_sizes": [0]},
        {"cudagraph_capture_sizes": ["auto", 4]},
        {"cudagraph_capture_sizes": "some"},
        {"cuda_graph_sizes": []},
        {"compile_sizes": ["every_size"]},
        {"num_speculative_tokens": 9},
        {"num_speculative_tokens": 2, "block_size": 2},
        {"num_speculative_tokens": 2, "max_num_batched_tokens": 2},
        {"num_speculative_tokens": 1, "cudagraph_capture_sizes": "auto"},
    ],
)
def test_flags_out_of_bounds_are_refused(flags):
    with pytest.raises(ValidationError):
        EngineConfig.from_flags(**flags)


def test_a_worker_reads_the_flags_that_the_service_writes():
    config = EngineConfig.from_flags(
        compilation_level=3,
        cudagraph_mode="full_and_piecewise",
        compile_sizes=[1, "cudagraph_capture_sizes"],
        inductor_compile_config={"max_autotune": True},
    )
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


def test_a_pattern_far_beyond_the_limit_is_not_made():
    config = CompilationConfig(cuda_graph_sizes=[MAX_INT32])
    assert config.capture_sizes(40) == (1, 2, 4, 8, 16, 32, 40)


def test_graphs_of_the_encoder_are_quarters_of_powers_of_two():
    config = CompilationConfig()
    sizes = config.encoder_sizes(8192, 4)
    assert sizes[:6] == (256, 320, 384, 448, 512, 640)
    assert sizes[-2:] == (7168, 8192)
    assert len(sizes) == 21
    # Images of a megapixel and of 0.75 fit exactly.
    assert {4096, 3072} <= set(sizes)
    assert config.encoder_sizes(10**6, 4) == sizes
    assert config.encoder_sizes(300, 4) == (256, 300)
    assert config.encoder_sizes(10, 9) == (18,)
    # Whole tiles.
    assert config.encoder_sizes(2048, 576) == (576, 1152, 1728, 2304)


def test_listed_sizes_of_the_encoder_are_rounded_up_to_whole_vectors():
    config = CompilationConfig(cudagraph_encoder_sizes=[30, 64, 62])
    assert config.encoder_sizes(16, 4) == (32, 64)
    assert CompilationConfig(cudagraph_encoder_sizes=[]).encoder_sizes(16, 4) == ()
