"""A rank's position among the processes that share a model."""

from dataclasses import dataclass

TENSOR_PARALLEL = "tensor_parallel"
"""Name of the group whose ranks each hold a share of every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """Processes that each hold a share of every layer.

    The default is one process that holds everything; it calls no collectives and needs no
    torch.distributed. `name` is that of models.parallel.collectives. With enable_expert_parallel
    each rank holds whole experts, and num_redundant_experts of them twice.
    """

    rank: int = 0
    size: int = 1
    name: str = TENSOR_PARALLEL
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        """Checks that the rank is inside the group."""
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be in [0, {self.size})")

    def split(self, total: int, what: str, *, replicas: int = 1) -> int:
        """Returns one rank's share of `total`, where `replicas` neighbours hold the same share.

        Raises:
            ValueError: the ranks cannot hold equal shares.
        """
        if self.size % replicas or total % (self.size // replicas):
            raise ValueError(f"{total} {what} cannot be shared equally by {self.size} ranks")
        return total // (self.size // replicas)


SINGLE = ParallelGroup()
"""The group of a process that holds a whole model."""
