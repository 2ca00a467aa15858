"""Turns of a compilation and of captures."""

import threading

import pytest

from services.engine.worker.graphs import turns as module
from services.engine.worker.graphs.turns import Turns

WAIT_S = 60


def test_a_compilation_is_held_up_only_where_it_waits():
    turns, waits, goes_on = Turns(), threading.Event(), threading.Event()
    worked = []

    def compile_model():
        with turns.work():
            worked.append(turns.hold_up())
            with turns.pause():
                waits.set()
                goes_on.wait(WAIT_S)
            worked.append(turns.hold_up())

    thread = threading.Thread(target=compile_model)
    thread.start()
    waits.wait(WAIT_S)
    assert turns.hold_up()
    goes_on.set()
    # It goes on when it is let go alone.
    assert thread.is_alive()
    turns.let_go()
    thread.join(WAIT_S)
    assert worked == [False, False]
    assert turns.compilation_waits


def test_a_compilation_gives_way_until_captures_have_nothing_to_do():
    turns, works, goes_on = Turns(), threading.Event(), threading.Event()

    def compile_model():
        with turns.work():
            works.set()
            goes_on.wait(WAIT_S)
            turns.give_way()
            assert not turns.compilation_waits

    thread = threading.Thread(target=compile_model)
    thread.start()
    works.wait(WAIT_S)
    assert not turns.hold_up()
    turns.is_wanted = True
    goes_on.set()
    while not turns.hold_up():
        pass
    turns.is_wanted = False
    turns.let_go()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_compilation_gives_way_for_a_bounded_time(is_wanted, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAY_S", 0.01)
    turns = Turns()
    turns.is_wanted = is_wanted
    with turns.work():
        turns.give_way()
        assert not turns.compilation_waits
