"""Which cases of large matrices a plain run leaves out, and which of these a change concerns.

`tests/matrices.toml` names tests and the cases of each that always run: as many as a number says,
spread evenly over all, or a list of ids. The others are marked `matrix`.
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


def mark_more_cases(items: Iterable[pytest.Item]) -> None:
    """Marks the cases that do not always run.

    Raises:
        pytest.UsageError: the table names a case that a collected test does not have.
    """
    kept_of = tomllib.loads(TABLE.read_text())
    cases_of = defaultdict(list)
    for item in items:
        cases_of[item.nodeid.partition("[")[0]].append(item)
    for test in kept_of.keys() & cases_of.keys():
        for case in _others(test, cases_of[test], kept_of[test]):
            case.add_marker("matrix")


def _others(test: str, cases: list[pytest.Item], kept: int | list[str]) -> list[pytest.Item]:
    if isinstance(kept, int):
        last = len(cases) - 1
        places = {last * at // max(kept - 1, 1) for at in range(kept)}
        return [case for at, case in enumerate(cases) if at not in places]
    ids = [case.nodeid[len(test) :].strip("[]") for case in cases]
    if unknown := set(kept).difference(ids):
        raise pytest.UsageError(f"{TABLE.name}: {test} has no case {sorted(unknown)}")
    return [case for case, each in zip(cases, ids, strict=True) if each not in kept]


def unconcerned(items: Iterable[pytest.Item], changes: ChangedSources) -> list[pytest.Item]:
    """Returns the cases that a plain run leaves out and that no change concerns."""
    more = [item for item in items if any(map(item.get_closest_marker, MARKERS))]
    concerned = {path: changes.concern(path) for path in {item.path for item in more}}
    return [item for item in more if not concerned[item.path]]
