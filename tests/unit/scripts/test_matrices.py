"""tests/matrices.toml: which cases always run."""

import tomllib
from pathlib import Path

import pytest

from tests.support import matrices
from tests.support.matrices import TABLE, mark_more_cases, unconcerned

ROOT = Path(__file__).resolve().parents[3]


class Case:
    """The part of pytest's items that is asked for."""

    def __init__(self, nodeid):
        self.nodeid = nodeid
        self.path = Path(nodeid.partition("::")[0])
        self.markers = []

    def add_marker(self, name):
        self.markers.append(name)

    def get_closest_marker(self, name):
        return name if name in self.markers else None


def kept(monkeypatch, tmp_path, table, *ids):
    path = tmp_path / "matrices.toml"
    path.write_text(table)
    monkeypatch.setattr(matrices, "TABLE", path)
    cases = [Case(f"test_a.py::test_a{each}") for each in ids]
    mark_more_cases(cases)
    return [case.nodeid.removeprefix("test_a.py::test_a") for case in cases if not case.markers]


NUMBERS = [f"[{n}]" for n in range(9)]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, []), (1, ["[0]"]), (2, ["[0]", "[8]"]), (3, ["[0]", "[4]", "[8]"]), (20, NUMBERS)],
)
def test_a_number_is_spread_over_all_cases(monkeypatch, tmp_path, number, expected):
    assert kept(monkeypatch, tmp_path, f'"test_a.py::test_a" = {number}', *NUMBERS) == expected


def test_a_share_is_spread_but_never_every_nth_case(monkeypatch, tmp_path):
    table = '"test_a.py::test_a" = 0.5'
    assert kept(monkeypatch, tmp_path, table, *NUMBERS) == ["[0]", "[2]", "[5]", "[8]"]
    many = [f"[{n}]" for n in range(100)]
    assert len(kept(monkeypatch, tmp_path, table, *many)) == 50
    assert kept(monkeypatch, tmp_path, table, *NUMBERS[:3]) == NUMBERS[:3]


def test_the_share_of_a_file_is_that_of_its_tests_without_a_row(monkeypatch, tmp_path):
    table = '"test_a.py" = 0.5\n'
    assert len(kept(monkeypatch, tmp_path, table, *NUMBERS)) == 4
    assert kept(monkeypatch, tmp_path, table + '"test_a.py::test_a" = 1', *NUMBERS) == ["[0]"]


def test_names_are_ids(monkeypatch, tmp_path):
    table = '"test_a.py::test_a" = ["7", "1"]\n"test_b.py::test_b" = 0\n'
    assert kept(monkeypatch, tmp_path, table, *NUMBERS) == ["[1]", "[7]"]


def test_an_unknown_case_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(pytest.UsageError, match=r"test_a has no case \['9'\]"):
        kept(monkeypatch, tmp_path, '"test_a.py::test_a" = ["9"]', *NUMBERS)


def test_a_test_without_cases_may_be_left_out(monkeypatch, tmp_path):
    assert kept(monkeypatch, tmp_path, '"test_a.py::test_a" = 0', "") == []


def test_cases_that_always_run_are_concerned_by_everything():
    always, matrix, family, changed = cases = [Case(f"test_{each}.py::test") for each in range(4)]
    matrix.add_marker("matrix")
    family.add_marker("families")
    changed.add_marker("matrix")

    class Changes:
        def concern(self, path):
            return path == changed.path

    assert unconcerned(cases, Changes()) == [matrix, family]
    assert not always.markers


def test_every_test_of_the_table_exists():
    for test in tomllib.loads(TABLE.read_text()):
        path, *names = test.split("::")
        text = (ROOT / path).read_text()
        assert all(f"def {name}(" in text for name in names[-1:]), test
