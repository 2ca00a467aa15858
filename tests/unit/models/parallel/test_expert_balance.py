from hypothesis import given
from hypothesis import strategies as st

from models.parallel.expert_balance import moves_between, rebalanced
from models.parallel.expert_placement import ExpertPlacement


@st.composite
def layers(draw):
    """Returns a placement, after some changes, and the load of each expert."""
    num_experts, num_ranks = draw(st.integers(1, 16)), draw(st.integers(1, 6))
    most = num_experts * (num_ranks - 1)
    placement = ExpertPlacement.first(num_experts, num_ranks, draw(st.integers(0, most)))
    loads = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    if draw(st.booleans()):
        placement = rebalanced(placement, draw(loads))
    return placement, draw(loads)


@given(layers())
def test_a_plan_keeps_every_expert_and_none_twice_on_a_rank(layer):
    placement, loads = layer
    plan = rebalanced(placement, loads)
    assert set(plan.physical_to_logical) == set(range(plan.num_experts))
    assert len(plan.physical_to_logical) == len(placement.physical_to_logical)
    for rank in range(plan.num_ranks):
        experts = plan.experts_of(rank)
        assert len(set(experts)) == len(experts)
        kept = set(experts) & set(placement.experts_of(rank))
        before = placement.experts_of(rank)
        assert all(experts.index(expert) == before.index(expert) for expert in kept)


@given(layers())
def test_the_busiest_rank_never_gets_more_to_do(layer):
    placement, loads = layer
    plan = rebalanced(placement, loads)
    before, after = max(placement.rank_loads(loads)), max(plan.rank_loads(loads))
    assert after < before or plan is placement


@given(st.integers(2, 8), st.integers(1, 8), st.data())
def test_ranks_differ_by_at_most_one_expert_s_load(num_ranks, num_local, data):
    num_experts = num_ranks * num_local
    loads = data.draw(
        # Close enough for every rank to get its share of experts before it is full.
        st.lists(st.integers(100, 100 + 100 // num_experts), min_size=num_experts,
                 max_size=num_experts)
    )  # fmt: skip
    plan = rebalanced(ExpertPlacement.first(num_experts, num_ranks), loads)
    ranks = plan.rank_loads(loads)
    assert max(ranks) - min(ranks) <= max(loads)


def test_copies_take_load_off_the_busiest_expert():
    loads = [1000, 10, 10, 10]
    plain = rebalanced(ExpertPlacement.first(4, 2), loads)
    copied = rebalanced(ExpertPlacement.first(4, 2, 2), loads)
    assert max(plain.rank_loads(loads)) == 1010
    assert max(copied.rank_loads(loads)) == 515


@given(layers())
def test_moves_lead_to_the_plan_and_never_lose_an_expert(layer):
    placement, loads = layer
    plan = rebalanced(placement, loads)
    slots = list(placement.physical_to_logical)
    moves = moves_between(placement, plan)
    for move in moves:
        taken = slots[move.target]
        slots[move.target] = slots[move.source]
        if move.is_swap:
            slots[move.source] = taken
        assert set(slots) == set(range(plan.num_experts))
    assert tuple(slots) == plan.physical_to_logical
    assert len(moves) <= len(slots)
