"""A rank's position among the processes that share a model, and their collectives."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """Processes that each hold a share of every layer.

    The default is one process that holds everything; its collectives cost nothing and need no
    torch.distributed. `process_group` is torch's handle; None means the default group.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        """Checks that the rank is inside the group."""
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be in [0, {self.size})")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum of every rank's tensor; may overwrite the one passed in."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns every rank's tensor, concatenated along the last dimension in rank order."""
        if self.size == 1:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(pieces, tensor.contiguous(), group=self.process_group)
        return torch.cat(pieces, dim=-1)

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
