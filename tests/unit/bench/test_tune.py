"""The tuner with a timer of its own: no kernel runs."""

import importlib.util
import shutil
from math import inf

import pytest

pytest.importorskip("triton")

from models.kernels.gpu import Gpu
from models.kernels.tuning import generic, hopper, registry
from models.kernels.tuning.table import look_up
from models.kernels.tuning.tiles import MatrixTiles, StateTiles
from tests.bench import tune
from tests.bench.table_file import FOLDER, path_of, rendered, write_table
from tests.bench.tune import TUNED, Row, run
from tests.bench.tuned_tables import Tuned

CARD = "NVIDIA L40S"
L40S = Gpu(capability=(8, 9), multiprocessors=142, shared_bytes=99 * 1024)
SLOW, FAST = StateTiles(columns=32, num_warps=4), StateTiles(columns=64, num_warps=1)


def chosen(key, size):
    return [lambda: look_up(registry.tables_of(L40S).delta_steps, size)]


STATES = Tuned(
    name="delta_steps",
    points={(7,): [1, 4], (inf,): [8]},
    candidates=lambda key, old: (SLOW, FAST),
    calls=chosen,
)


class Timer:
    """Says that wide tiles are fast for many requests; is interrupted at a call."""

    def __init__(self, interrupted_at=None):
        self.num_calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, calls):
        self.num_calls += 1
        if self.num_calls == self.interrupted_at:
            raise KeyboardInterrupt
        return 2.0 if calls[0]() == FAST else 5.0


@pytest.fixture(autouse=True)
def _states(monkeypatch):
    monkeypatch.setitem(TUNED, "delta_steps", STATES)


def loaded(path):
    spec = importlib.util.spec_from_file_location("written", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_card_gets_a_file_whose_other_tables_are_generic(tmp_path, capsys):
    path = tmp_path / "l40s.py"
    run(["delta_steps"], path, CARD, L40S, Timer())
    written = loaded(path)
    assert written.CAPABILITY == (8, 9)
    assert written.TABLES.delta_steps == (((7,), FAST), ((inf,), FAST))
    assert written.TABLES.single_tokens is generic.TABLES.single_tokens
    assert "tests.bench.tune delta_steps" in path.read_text()
    assert "StateTiles(columns=64, num_warps=1)" in capsys.readouterr().out
    assert registry.tables_of(L40S) is generic.TABLES


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "l40s.py"
    whole = Timer()
    run(["delta_steps"], tmp_path / "other.py", CARD, L40S, whole)
    with pytest.raises(KeyboardInterrupt):
        run(["delta_steps"], path, CARD, L40S, Timer(interrupted_at=4))
    assert not path.exists()
    rest = Timer()
    run(["delta_steps"], path, CARD, L40S, rest)
    assert rest.num_calls == whole.num_calls - 3
    with pytest.raises(ValueError, match="has times of NVIDIA L40S"):
        run(["delta_steps"], path, "NVIDIA L4", L40S, rest)


def test_a_gain_below_a_hundredth_changes_no_file(tmp_path):
    run(["delta_steps"], tmp_path / "l40s.py", CARD, L40S, lambda calls: 5.0)
    assert not (tmp_path / "l40s.py").exists()


def test_tables_and_constants_of_a_file_are_replaced(tmp_path):
    path = tmp_path / "copy.py"
    shutil.copy(FOLDER / "hopper.py", path)
    tiles = MatrixTiles(tokens=8, rows=128, columns=64, num_stages=3)
    expected = {
        "MATRICES": {**hopper.MATRICES, 8: tiles},
        "vectors": (((2, True, inf, inf), None),),
        "first_chunk": hopper.TABLES.later_chunk,
    }
    for name, table in expected.items():
        for _ in range(2):
            note = f"tests.bench.tune {name}"
            write_table(path, hopper.CAPABILITY, "NVIDIA H200", name, table, note)
    written = loaded(path)
    assert expected["MATRICES"] == written.MATRICES
    assert written.TABLES.vectors == expected["vectors"]
    assert written.TABLES.first_chunk == expected["first_chunk"]
    assert written.TABLES.later_chunk == hopper.TABLES.later_chunk
    assert written.TABLES.single_tokens == hopper.TABLES.single_tokens
    assert path.read_text().count("# tests.bench.tune MATRICES") == 1


def test_a_file_is_found_by_its_capability():
    assert path_of((9, 0)).name == "hopper.py"
    assert path_of((8, 6)).name == "sm_86.py"


def test_all_tables_to_tune_have_their_rows_and_candidates():
    for name, tuned in TUNED.items():
        gpu = Gpu(capability=hopper.CAPABILITY, multiprocessors=132, shared_bytes=227 * 1024)
        table = tune.current(name, gpu)
        for key, sizes in tuned.points.items():
            old = table[key] if isinstance(table, dict) else look_up(table, *key)
            candidates = set(tuned.candidates(key, old))
            assert sizes
            assert len(candidates) > 1
            assert {type(each) for each in candidates} <= {type(old), type(None)}
            assert rendered(old)
        rows = [Row(key=key, old=1, new=1, old_us=1.0, new_us=1.0) for key in tuned.points]
        assert tune.report(name, rows).count("as before") == len(rows)
