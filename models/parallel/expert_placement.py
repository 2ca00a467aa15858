"""Which rank holds which experts: each rank has equally many slots, each with one whole expert.

Slots that are left over hold second copies of experts, so any number of experts suits any number
of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The experts of a layer on all ranks.

    physical_to_logical: the expert in each slot, by rank; no rank holds one twice.
    """

    num_experts: int
    num_ranks: int
    physical_to_logical: tuple[int, ...]

    @classmethod
    def first(
        cls, num_experts: int, num_ranks: int, num_redundant_experts: int = 0
    ) -> "ExpertPlacement":
        """Returns the placement of a model that has just been loaded.

        Args:
            num_experts: of a layer.
            num_ranks: that share them.
            num_redundant_experts: copies beside the first ones; rounded up to fill all ranks.

        Raises:
            ValueError: a rank would hold an expert twice.
        """
        num_local = -(-(num_experts + num_redundant_experts) // num_ranks)
        if num_local > num_experts:
            raise ValueError(
                f"--num-redundant-experts is {num_redundant_experts}: {num_ranks} ranks can hold "
                f"at most {num_experts * (num_ranks - 1)} copies of {num_experts} experts"
            )
        slots = tuple(slot % num_experts for slot in range(num_local * num_ranks))
        return cls(num_experts=num_experts, num_ranks=num_ranks, physical_to_logical=slots)

    @property
    def num_local(self) -> int:
        """Slots of a rank."""
        return len(self.physical_to_logical) // self.num_ranks

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the expert in each slot of a rank."""
        first = rank * self.num_local
        return self.physical_to_logical[first : first + self.num_local]

    def logical_to_physical(self) -> list[list[int]]:
        """Returns each expert's slots, in order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.physical_to_logical):
            slots[expert].append(slot)
        return slots

    def expert_map(self, rank: int, *, uses_copies: bool = True) -> list[list[int]]:
        """Returns the slot that computes each expert, for one rank: [experts][ranks].

        Copies share the tokens of an expert: token t uses column t modulo the number of ranks. A
        slot counts from the rank's first; `num_local` stands for a slot of another rank. Unless
        it uses copies, the first slot of each expert computes all of its tokens.
        """
        first, num_local = rank * self.num_local, self.num_local

        def local(slot: int) -> int:
            return slot - first if first <= slot < first + num_local else num_local

        choices = self._choices()
        if not uses_copies:
            choices = [[slots[0]] * self.num_ranks for slots in self.logical_to_physical()]
        return [[local(slot) for slot in row] for row in choices]

    def rank_loads(self, expert_load: Sequence[float]) -> list[float]:
        """Returns how many tokens each rank computes, given each expert's."""
        loads = [0.0] * self.num_ranks
        for load, row in zip(expert_load, self._choices(), strict=True):
            for slot in row:
                loads[slot // self.num_local] += load / self.num_ranks
        return loads

    def _choices(self) -> list[list[int]]:
        """Returns the slot for each expert and each token modulo the number of ranks.

        Experts begin at different copies, so that single tokens do not all go to the first ones.
        """
        return [
            [slots[(column + expert) % len(slots)] for column in range(self.num_ranks)]
            for expert, slots in enumerate(self.logical_to_physical())
        ]
