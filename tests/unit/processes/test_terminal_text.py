"""Text that strangers wrote, as terminals get it."""

import pytest

from services.processes.terminal_text import terminal_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0=\x07", r"\x1b]52;c;cm0=\x07"),
        ("a\x9b2Jb\x7f", r"a\x9b2Jb\x7f"),
        ("one\rtwo", r"one\rtwo"),
        ("abc\u202edef\u2069", r"abc\u202edef\u2069"),
        ("half \ud83d", r"half \ud83d"),
        ("na\u00efve \u4f60\u597d \U0001f468\u200d\U0001f469 [/b] \\x1b", None),
    ],
)
@pytest.mark.parametrize("keeps_lines", [False, True])
def test_what_a_terminal_obeys_is_an_escape(text, shown, keeps_lines):
    assert terminal_text(text, keeps_lines=keeps_lines) == (text if shown is None else shown)


def test_lines_are_kept_where_they_are_wanted():
    text = "one\n\ttwo"
    assert terminal_text(text, keeps_lines=True) == text
    assert terminal_text(text + "\u2028") == r"one\n\ttwo\u2028"
