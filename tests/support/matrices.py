"""Which cases of large matrices a plain run leaves out, and which of these a change concerns.

`tests/matrices.toml` names tests and the cases of each that always run: as many as a number says,
or a share of them, spread evenly over all, or a list of ids. A file's share is that of each of its
tests that is not named. The others are marked `matrix`.
"""

import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.changed_sources import ChangedSources

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "matrices.toml"
MARKERS = ("matrix", "families")
FEW = 4
"""Cases that a share is not taken of."""


def mark_more_cases(items: Iterable[pytest.Item]) -> None:
    """Marks the cases that do not always run.

    Raises:
        pytest.UsageError: the table names a case that a collected test does not have.
    """
    kept_of = tomllib.loads(TABLE.read_text())
    cases_of = defaultdict(list)
    for item in items:
        cases_of[item.nodeid.partition("[")[0]].append(item)
    for test, cases in cases_of.items():
        kept = kept_of.get(test, kept_of.get(test.partition("::")[0]))
        if kept is not None:
            for case in _others(test, cases, kept):
                case.add_marker("matrix")


def _others(test: str, cases: list[pytest.Item], kept: float | list[str]) -> list[pytest.Item]:
    if isinstance(kept, float):
        kept = _number(len(cases), kept)
    if isinstance(kept, int):
        last = len(cases) - 1
        places = {last * at // max(kept - 1, 1) for at in range(kept)}
        return [case for at, case in enumerate(cases) if at not in places]
    ids = [case.nodeid[len(test) :].strip("[]") for case in cases]
    if unknown := set(kept).difference(ids):
        raise pytest.UsageError(f"{TABLE.name}: {test} has no case {sorted(unknown)}")
    return [case for case, each in zip(cases, ids, strict=True) if each not in kept]


def _number(num_cases: int, share: float) -> int:
    """Returns how many cases are a share of them: all of a few, and never every n-th one.

    An inner parameter with n values would have the same one in every n-th case.
    """
    number = max(FEW, round(share * num_cases))
    if number >= num_cases:
        return num_cases
    while number > FEW and (num_cases - 1) % (number - 1) == 0:
        number -= 1
    return number


def unconcerned(items: Iterable[pytest.Item], changes: ChangedSources) -> list[pytest.Item]:
    """Returns the cases that a plain run leaves out and that no change concerns."""
    more = [item for item in items if any(map(item.get_closest_marker, MARKERS))]
    concerned = {path: changes.concern(path) for path in {item.path for item in more}}
    return [item for item in more if not concerned[item.path]]
