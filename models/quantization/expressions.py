"""Matches names of modules with the patterns of a checkpoint, in bounded time."""

import re
import time
from collections import defaultdict
from fnmatch import fnmatchcase

import regex

from models.config_sections.fields import ConfigError, shown

MATCH_LIMIT_S = 2.0
"""CPU time of one match; real ones take microseconds."""
TOTAL_LIMIT_S = 60.0
"""CPU time of all matches of one checkpoint; real ones take seconds."""
MAX_EXPRESSION = 2**14
"""Most characters of an expression."""
EXPRESSION = "re:"
"""Start of a pattern that is a regular expression."""


class Patterns:
    """The patterns of one checkpoint, and the time that their matches took.

    A regular expression that backtracks can take exponential time. `re` offers no way to stop it;
    `regex` reads the same language and takes a limit.
    """

    def __init__(self) -> None:
        self._compiled: dict[str, regex.Pattern[str]] = {}
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._total_s = 0.0

    def match_part(self, pattern: str, module: str) -> bool:
        """Returns whether a pattern covers a module, or one that the module is a part of.

        pattern: consecutive parts of a name, a whole name with `*`, or an expression after `re:`.

        Raises:
            ConfigError: the expressions take too long.
        """
        if pattern.startswith(EXPRESSION):
            return self._match(pattern.removeprefix(EXPRESSION), module)
        if "*" in pattern:
            return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
        # Some lists end names in a dot, so that a search for text does not find longer ones.
        return f".{pattern.strip('.')}." in f".{module}."

    def match_end(self, pattern: str, module: str) -> bool:
        """Returns whether a pattern is a module's name or its end; others as in match_part."""
        if "*" in pattern or pattern.startswith(EXPRESSION):
            return self.match_part(pattern, module)
        return f".{module}".endswith(f".{pattern}")

    def _match(self, expression: str, name: str) -> bool:
        if self._total_s > TOTAL_LIMIT_S:
            raise self._refusal(max(self._spent_s, key=self._spent_s.__getitem__))
        if expression not in self._compiled:
            self._compiled[expression] = regex.compile(expression)
        started_s = time.process_time()
        try:
            found = self._compiled[expression].match(name, timeout=MATCH_LIMIT_S)
        except TimeoutError:
            raise self._refusal(expression) from None
        took_s = time.process_time() - started_s
        self._spent_s[expression] += took_s
        self._total_s += took_s
        return found is not None

    def _refusal(self, expression: str) -> ConfigError:
        return ConfigError(
            f"quantization_config: the regular expression {shown(expression)} takes too long to "
            "match with the names of modules"
        )


def find_fault(expression: str) -> str | None:
    """Returns why a text is no regular expression that may be matched; None if it is one."""
    if len(expression) > MAX_EXPRESSION:
        return f"it has {len(expression)} characters; the limit is {MAX_EXPRESSION}"
    try:
        re.compile(expression)
        regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:  # numbers, nesting
        return str(error)
    return None
