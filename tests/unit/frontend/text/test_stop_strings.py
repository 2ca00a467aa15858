"""Stop strings end the text wherever the text is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.stop_strings import StopStrings

letters = st.text("ab", max_size=30)
stops_of_letters = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Reads character by character and looks at everything read so far."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        scan = watcher.push(piece)
        shown += scan.text
        if scan.stop_string is not None:
            return shown, scan.stop_string
    return shown + watcher.flush(), None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=letters, stops=stops_of_letters, cuts=st.lists(st.integers(0, 30)))
def test_any_cutting_gives_what_reading_at_once_gives(text, stops, cuts):
    assert run(cut(text, cuts), stops) == reference(text, stops)


@given(text=letters, stops=stops_of_letters)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text, stops):
    watcher = StopStrings(stops)
    seen = shown = ""
    for character in text:
        seen += character
        scan = watcher.push(character)
        shown += scan.text
        if scan.stop_string is not None:
            return
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = seen[len(shown) - 1 :] if shown else ""
        assert not longer or not any(stop.startswith(longer) for stop in stops)


def test_without_stop_strings_everything_passes():
    watcher = StopStrings([])
    assert not watcher
    assert watcher.push("text").text == "text"


def test_a_long_repetitive_stop_string_is_read_in_linear_time():
    stop = "a" * 255 + "b"
    watcher = StopStrings([stop])
    text = "".join(watcher.push("a" * 10_000).text for _ in range(10))
    assert len(text) == 100_000 - 255
    scan = watcher.push("b")
    assert (scan.text, scan.stop_string) == ("", stop)


@given(
    text=letters,
    stops=stops_of_letters,
    cuts=st.lists(st.integers(0, 30)),
    num_passed=st.integers(0, 31),
)
def test_what_is_complete_in_text_that_may_not_end_is_no_stop_string(text, stops, cuts, num_passed):
    passed, rest = text[:num_passed], text[num_passed:]
    watcher = StopStrings(stops)
    shown, found = "", None
    for piece in cut(passed, cuts):
        shown += watcher.push(piece, may_end=False).text
    for piece in cut(rest, cuts):
        if found is None:
            scan = watcher.push(piece)
            shown, found = shown + scan.text, scan.stop_string
    if found is None:
        shown += watcher.flush()
    ends = [
        (end, max(ending, key=len))
        for end in range(len(passed) + 1, len(text) + 1)
        if (ending := [stop for stop in stops if text[:end].endswith(stop)])
    ]
    if ends:
        end, longest = ends[0]
        assert (shown, found) == (text[: end - len(longest)], longest)
    else:
        assert (shown, found) == (text, None)


@given(text=letters, stops=stops_of_letters, cuts=st.lists(st.integers(0, 30)))
def test_shown_stop_strings_end_the_text_and_nothing_waits(text, stops, cuts):
    watcher = StopStrings(stops, are_shown=True)
    before, found = reference(text, stops)
    expected = before + (found or "")
    seen = shown = ""
    for piece in cut(text, cuts):
        seen += piece
        scan = watcher.push(piece)
        shown += scan.text
        assert shown == expected[: len(seen)]
        if scan.stop_string is not None:
            break
    assert (shown, scan.stop_string if text else None) == (expected, found)
    assert watcher.flush() == ""
