from math import inf

import pytest

from models.kernels import tuning
from models.kernels.gpu import Gpu
from models.kernels.tuning import generic, hopper, registry
from models.kernels.tuning.registry import tables_of
from models.kernels.tuning.table import look_up
from tests.support.gpu_facts import CARDS, forget_choices

FILE = """
from dataclasses import replace
from models.kernels.tuning import generic
CAPABILITY = (8, 9)
TABLES = replace(generic.TABLES, most_pairs=7)
"""


@pytest.fixture
def _ada(tmp_path, monkeypatch):
    (tmp_path / "ada.py").write_text(FILE)
    monkeypatch.setattr(tuning, "__path__", [*tuning.__path__, str(tmp_path)])
    forget_choices()
    yield
    forget_choices()


def test_cards_without_a_file_have_generic_tables():
    found = {card for card, gpu in CARDS.items() if tables_of(gpu) is not generic.TABLES}
    assert found == {"H200"}
    assert tables_of(CARDS["H200"]) is hopper.TABLES


def test_a_card_that_counts_as_unmeasured_has_generic_tables():
    gpu = Gpu(capability=(9, 0), multiprocessors=132, shared_bytes=99 * 1024, is_generic=True)
    assert tables_of(gpu) is generic.TABLES


@pytest.mark.usefixtures("_ada")
def test_a_new_card_is_one_new_file():
    assert tables_of(CARDS["L40S"]).most_pairs == 7
    assert tables_of(CARDS["H200"]) is hopper.TABLES
    assert tables_of(CARDS["A10"]) is generic.TABLES


def test_tables_to_try_count_for_all_cards_until_they_are_taken_back():
    registry.use_tables(hopper.TABLES)
    assert tables_of(CARDS["A10"]) is hopper.TABLES
    registry.use_tables(None)
    assert tables_of(CARDS["A10"]) is generic.TABLES


def test_the_first_row_that_no_size_is_over_counts():
    rows = (((1, 10), "small"), ((2, inf), "long"))
    assert [look_up(rows, *sizes) for sizes in ((1, 10), (1, 11), (2, 5), (3, 5))] == [
        "small", "long", "long", None
    ]  # fmt: skip
