"""Plans which rank should hold which experts, so that all ranks compute about equally many tokens.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.parallel.expert_placement import ExpertPlacement


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """One change of two slots: `target` gets the expert of `source`.

    is_swap: whether `source` gets the expert of `target`, which no third slot has.
    """

    source: int
    target: int
    is_swap: bool


def rebalanced(placement: ExpertPlacement, expert_load: Sequence[float]) -> ExpertPlacement:
    """Returns a placement whose busiest rank computes fewer tokens; the given one if none is found.

    Experts that stay on their rank keep their slots.

    Args:
        placement: the present one.
        expert_load: tokens of each expert.
    """
    num_copies = _num_copies(placement, expert_load)
    by_rank = _packed(placement, expert_load, num_copies)
    slots: list[int] = []
    for rank, experts in enumerate(by_rank):
        before = placement.experts_of(rank)
        new = [expert for expert in experts if expert not in before]
        slots += [expert if expert in experts else new.pop() for expert in before]
    found = replace(placement, physical_to_logical=tuple(slots))
    is_better = max(found.rank_loads(expert_load)) < max(placement.rank_loads(expert_load))
    return found if is_better else placement


def moves_between(before: ExpertPlacement, after: ExpertPlacement) -> list[ExpertMove]:
    """Returns moves, in order, that lead from one placement to another.

    Every expert is in some slot at any time, and a move needs room for one expert.
    """
    current, wanted = list(before.physical_to_logical), after.physical_to_logical
    moves = []
    for slot in range(len(current)):
        while current[slot] != wanted[slot]:
            own = current[slot]
            sources = [each for each, expert in enumerate(current) if expert == wanted[slot]]
            if current.count(own) > 1:
                move = ExpertMove(sources[0], slot, is_swap=False)
            else:
                moving = [each for each in sources if current[each] != wanted[each]]
                # Where all copies stay, the slot's own expert is brought home first.
                partner = moving[0] if moving else wanted.index(own)
                move = ExpertMove(partner, slot, is_swap=True)
                current[partner], current[slot] = own, current[partner]
            if not move.is_swap:
                current[slot] = current[move.source]
            moves.append(move)
    return moves


def _num_copies(placement: ExpertPlacement, expert_load: Sequence[float]) -> list[int]:
    """Returns how many slots each expert gets: spare slots go to the busiest experts."""
    copies = [1] * placement.num_experts
    for _ in range(len(placement.physical_to_logical) - placement.num_experts):
        open_experts = (
            expert for expert, count in enumerate(copies) if count < placement.num_ranks
        )
        busiest = max(open_experts, key=lambda expert: expert_load[expert] / copies[expert])
        copies[busiest] += 1
    return copies


def _packed(
    placement: ExpertPlacement, expert_load: Sequence[float], num_copies: Sequence[int]
) -> list[list[int]]:
    """Returns the experts of each rank: the largest loads first, each to the least busy rank."""
    shares = [load / count for load, count in zip(expert_load, num_copies, strict=True)]
    ranks: list[list[int]] = [[] for _ in range(placement.num_ranks)]
    loads = [0.0] * placement.num_ranks

    def has_room(rank: int) -> bool:
        return len(ranks[rank]) < placement.num_local

    def give(expert: int, rank: int) -> None:
        ranks[rank].append(expert)
        loads[rank] += shares[expert]

    order = sorted(range(placement.num_experts), key=lambda expert: -shares[expert])
    for expert in (each for each in order for _ in range(num_copies[each])):
        others = [rank for rank, experts in enumerate(ranks) if expert not in experts]
        with_room = [rank for rank in others if has_room(rank)]
        if with_room:
            give(expert, min(with_room, key=lambda rank: loads[rank]))
            continue
        # Only ranks with a copy have room: a full one passes an expert on, and takes this one.
        target = next(rank for rank in range(placement.num_ranks) if has_room(rank))
        full = min(others, key=lambda rank: loads[rank])
        passed_on = min(set(ranks[full]) - set(ranks[target]), key=lambda each: shares[each])
        ranks[full].remove(passed_on)
        loads[full] -= shares[passed_on]
        give(passed_on, target)
        give(expert, full)
    return ranks
