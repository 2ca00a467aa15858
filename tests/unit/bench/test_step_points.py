"""Points of profiles, and the graphs that they run."""

import argparse

import pytest

from services.engine.config.compilation import CompilationConfig
from tests.bench.step_points import Point, read_points, with_graphs_of


def test_points_are_decodes_prompts_and_both():
    points = read_points("1,32,p2048,64+512")
    assert points == [Point(1, 0), Point(32, 0), Point(0, 2048), Point(64, 512)]
    assert [point.num_tokens for point in points] == [1, 32, 2048, 576]
    assert [str(point) for point in points] == ["1", "32", "p2048", "64+512"]


@pytest.mark.parametrize("text", ["", "0", "p0", "p", "1+", "0+8", "-1", "two", "1,,2", "1+2+3"])
def test_other_points_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="a point is N, pN or N\\+M"):
        read_points(text)


def test_graphs_are_those_that_points_run():
    config = with_graphs_of(
        read_points("1,20,24,p2048,p8192,64+500"),
        CompilationConfig(),
        max_num_seqs=256,
        max_num_tokens=16384,
    )
    assert config.capture_sizes(256) == (1, 32)
    # Longer prompts than 2048 tokens have no graph; 564 tokens run by one of 576.
    assert config.piece_sizes(16384) == (576, 2048)


def test_points_without_decodes_need_no_graph_of_decodes():
    config = with_graphs_of(
        read_points("p64"), CompilationConfig(), max_num_seqs=8, max_num_tokens=128
    )
    assert config.capture_sizes(8) == ()
    assert config.piece_sizes(128) == (64,)
