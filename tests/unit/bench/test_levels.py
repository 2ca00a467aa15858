"""Rows of the table of compilation levels."""

from tests.bench.levels import LEVELS, MODES, Choice, agreement, choices


def test_pieces_are_captured_at_every_level_but_the_first():
    names = {choice.name for choice in choices(list(LEVELS), list(MODES))}
    assert {"level 0 piecewise", "level 3 full_and_piecewise"} <= names
    assert "level 1 piecewise" not in names
    assert len(names) == 18


def test_the_eager_row_comes_first_whatever_the_order_asked_for():
    assert choices([3, 0], ["full", "none"])[0] == Choice(0, "none")


def test_without_level_0_there_is_no_eager_row():
    assert choices([3], ["none"]) == [Choice(3, "none")]


def test_agreement_counts_equal_requests_and_tokens_before_a_difference():
    found = agreement([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]])
    assert found == {"num_requests": 2, "num_equal": 1, "equal_tokens": 4 / 6}
