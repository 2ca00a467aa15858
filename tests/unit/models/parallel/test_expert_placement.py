import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.parallel.expert_placement import ExpertPlacement


@st.composite
def first_placements(draw):
    num_experts, num_ranks = draw(st.integers(1, 20)), draw(st.integers(1, 8))
    most = num_experts * (num_ranks - 1)
    return ExpertPlacement.first(num_experts, num_ranks, draw(st.integers(0, most)))


@given(first_placements())
def test_ranks_hold_equally_many_experts_none_of_them_twice(placement):
    held = [placement.experts_of(rank) for rank in range(placement.num_ranks)]
    assert {len(each) for each in held} == {placement.num_local}
    assert all(len(set(each)) == len(each) for each in held)
    assert {expert for each in held for expert in each} == set(range(placement.num_experts))


@given(first_placements())
def test_one_rank_computes_each_choice(placement):
    maps = [placement.expert_map(rank) for rank in range(placement.num_ranks)]
    for expert in range(placement.num_experts):
        for column in range(placement.num_ranks):
            slots = [each[expert][column] for each in maps]
            [(rank, slot)] = [
                (rank, slot) for rank, slot in enumerate(slots) if slot < placement.num_local
            ]
            assert placement.experts_of(rank)[slot] == expert


@given(first_placements(), st.data())
def test_the_loads_of_ranks_are_those_of_their_experts(placement, data):
    size = placement.num_experts
    loads = data.draw(st.lists(st.integers(0, 100), min_size=size, max_size=size))
    assert sum(placement.rank_loads(loads)) == pytest.approx(sum(loads))


def test_more_copies_than_ranks_have_room_for_are_refused():
    with pytest.raises(ValueError, match="at most 8 copies of 8 experts"):
        ExpertPlacement.first(8, 2, 9)


def test_without_copies_one_slot_computes_all_tokens_of_an_expert():
    placement = ExpertPlacement.first(5, 3, 1)
    maps = [placement.expert_map(rank, uses_copies=False) for rank in range(3)]
    for expert in range(5):
        columns = [[own[expert][column] for own in maps] for column in range(3)]
        assert columns[0] == columns[1] == columns[2]
        assert sum(slot < placement.num_local for slot in columns[0]) == 1
