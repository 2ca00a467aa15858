"""Text that strangers wrote, in a form that a terminal only shows.

A terminal obeys what it is sent: escape sequences set its title and the clipboard, move the cursor
over earlier lines, or answer as if the user had typed. Marks of direction make text look different
from what it is.
"""

import re

_DIRECTIONS = "\u202a-\u202e\u2066-\u2069"
_OBEYED = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_DIRECTIONS}\ud800-\udfff]")
_OBEYED_IN_LINES = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTIONS}\ud800-\udfff]")


def terminal_text(text: str, *, keeps_lines: bool = False) -> str:
    r"""Returns a text with what a terminal would obey written as escapes, such as \x1b.

    Args:
        text: anything.
        keeps_lines: leaves line breaks and tabs as they are; without, the text stays on its line.
    """
    return (_OBEYED_IN_LINES if keeps_lines else _OBEYED).sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
