"""README's pictures say what docs/benchmarks.md says."""

import pytest

from tests.bench.readme_pictures import (
    BENCHMARKS,
    ROOT,
    decode_figures,
    draw_decode,
    draw_start,
    start_figures,
)

TEXT = BENCHMARKS.read_text()


@pytest.mark.parametrize(
    ("name", "draw"), [("readme-decode.svg", draw_decode), ("readme-start.svg", draw_start)]
)
def test_a_picture_is_drawn_from_todays_tables(name, draw):
    drawn = str(draw(TEXT))
    assert (ROOT / "docs" / name).read_text() == drawn, "run python -m tests.bench.readme_pictures"


def test_figures_are_medians_and_the_peers_best():
    assert decode_figures(TEXT, "Qwen3-8B")["1"][1] == 5.21
    assert decode_figures(TEXT, "Qwen3-0.6B")["1"][1] == 1.86
    assert start_figures(TEXT)["8B, caches empty"] == (6.10, 102.8)
