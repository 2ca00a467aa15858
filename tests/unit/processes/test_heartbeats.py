import pytest

from services.processes import heartbeats
from services.processes.heartbeats import (
    DIED,
    HUNG,
    HUNG_LOOKS,
    SILENT_LOOKS,
    START_LOOKS,
    Heartbeats,
)


@pytest.fixture
def beats():
    beats = Heartbeats(2)
    for process in range(2):
        beats.begin(process)
    return beats


def looks(beats, number, *, of=(0,)):
    return [beats.look(of) for _ in range(number)]


def test_a_process_hangs_after_looks_without_a_sign(beats):
    beats.beat(0)
    assert looks(beats, HUNG_LOOKS + 1) == [None] * HUNG_LOOKS + [0]


def test_any_sign_between_two_looks_is_enough(beats):
    for _ in range(3):
        beats.beat(0)
        assert looks(beats, HUNG_LOOKS) == [None] * HUNG_LOOKS


def test_a_parent_that_did_not_look_for_long_takes_no_process_for_hung(beats):
    beats.beat(0)
    looks(beats, 2)
    # Days may pass here: only looks count.
    assert looks(beats, 1) == [None]


def test_a_process_that_starts_has_longer_for_its_first_sign(beats):
    assert looks(beats, START_LOOKS) == [None] * (START_LOOKS - 1) + [0]
    beats.begin(0)
    assert looks(beats, 1) == [None]


def test_of_silent_processes_the_first_hangs_and_others_may_only_have_waited_for_it(beats):
    beats.beat(1)
    looks(beats, 2, of=(0, 1))
    beats.beat(0)
    assert looks(beats, HUNG_LOOKS - 1, of=(0, 1)) == [None] * (HUNG_LOOKS - 2) + [1]
    assert looks(beats, HUNG_LOOKS, of=(0,)) == [None] * (HUNG_LOOKS - 1) + [0]


def test_silent_and_starting_processes_do_not_count_as_serving(beats):
    assert (beats.num_serving, beats.num_processes) == (0, 2)
    beats.beat(0)
    beats.beat(1)
    assert beats.num_serving == 2
    looks(beats, SILENT_LOOKS + 1)
    assert beats.num_serving == 1
    beats.beat(0)
    looks(beats, 1)
    assert beats.num_serving == 2


def test_losses_are_counted_by_reason(beats):
    beats.note_loss(HUNG)
    beats.note_loss(HUNG)
    beats.note_loss(DIED)
    assert beats.num_lost == {"died": 1, "hung": 2}


async def test_a_process_beats_once_an_interval(beats, monkeypatch):
    class EndedError(Exception):
        pass

    async def sleep(duration_s):
        assert duration_s == heartbeats.BEAT_INTERVAL_S
        numbers.append(beats.num_serving)
        if len(numbers) == 2:
            raise EndedError

    numbers = []
    monkeypatch.setattr(heartbeats.asyncio, "sleep", sleep)
    with pytest.raises(EndedError):
        await beats.keep(0)
    assert numbers == [1, 1]
