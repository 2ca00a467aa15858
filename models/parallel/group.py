"""A rank's position among the processes that share a model."""

from dataclasses import dataclass

TENSOR_PARALLEL = "tensor_parallel"
"""Name of the group whose ranks each hold a share of every layer."""
DATA_PARALLEL = "data_parallel"
"""Name of the group whose ranks have different tokens and the same share of every layer."""
EXPERT_PARALLEL = "expert_parallel"
"""Name of the group of all data-parallel ranks' processes, which share the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One of the consecutive runs of layers that a model is split into.

    The default is the whole model. The first stage embeds; the last has the final norm and the
    head.

    num_layers: layers of each stage; empty: as equal as possible, later stages one fewer, as the
        last has the head.
    """

    rank: int = 0
    size: int = 1
    num_layers: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits."""
        return self.rank == self.size - 1

    def layers_of(self, total: int) -> range:
        """Returns the stage's layers of a model with `total`.

        Raises:
            ValueError: the stages cannot hold as many.
        """
        if self.num_layers and sum(self.num_layers) != total:
            stages = ", ".join(map(str, self.num_layers))
            raise ValueError(f"stages of {stages} layers do not hold the model's {total} layers")
        if total < self.size:
            raise ValueError(f"{total} layers are too few for {self.size} pipeline stages")
        if self.num_layers:
            first = sum(self.num_layers[: self.rank])
            return range(first, first + self.num_layers[self.rank])
        first, end = (-(-rank * total // self.size) for rank in (self.rank, self.rank + 1))
        return range(first, end)


WHOLE_MODEL = PipelineStage()
"""The stage of a process that holds every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """Processes that each hold a share of every layer of a stage.

    The default is one process that holds everything; it calls no collectives and needs no
    torch.distributed. `name` is that of models.parallel.collectives. With enable_expert_parallel
    each rank holds whole experts, and num_redundant_experts of them twice. Data-parallel ranks are
    such groups with tokens of their own; all their processes share the experts, which are whole.
    """

    rank: int = 0
    size: int = 1
    name: str = TENSOR_PARALLEL
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    stage: PipelineStage = WHOLE_MODEL
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        """Checks that the rank is inside the group."""
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank is {self.rank}; it must be in [0, {self.size})")

    @property
    def of_experts(self) -> "ParallelGroup":
        """The ranks that share the experts; this group, unless it is one of several."""
        if self.data_parallel_size == 1:
            return self
        return ParallelGroup(
            rank=self.data_parallel_rank * self.size + self.rank,
            size=self.data_parallel_size * self.size,
            name=EXPERT_PARALLEL,
            enable_expert_parallel=True,
            num_redundant_experts=self.num_redundant_experts,
        )

    @property
    def of_other_tokens(self) -> "ParallelGroup | None":
        """The ranks with the same share of every layer and other tokens, if there are any."""
        if self.data_parallel_size == 1:
            return None
        return ParallelGroup(
            rank=self.data_parallel_rank, size=self.data_parallel_size, name=DATA_PARALLEL
        )

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
