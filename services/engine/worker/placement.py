"""The ranks of an engine: their numbers, coordinates and devices."""

from dataclasses import dataclass

from services.engine.config.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank.

    rank: its number among all. pipeline_parallel_rank, data_parallel_rank, tensor_parallel_rank:
        its coordinates; the last one counts fastest. node: its host, 0 for the engine's own.
    device: number of its GPU there, if it has one.
    """

    rank: int
    pipeline_parallel_rank: int
    data_parallel_rank: int
    tensor_parallel_rank: int
    node: int
    device: int


def rank_places(config: ParallelConfig) -> list[RankPlace]:
    """Returns every rank, in order."""
    per_node = config.ranks_per_node
    devices = config.devices or range(per_node)
    return [
        RankPlace(
            rank=rank,
            pipeline_parallel_rank=rank // config.tensor_parallel_size,
            data_parallel_rank=0,
            tensor_parallel_rank=rank % config.tensor_parallel_size,
            node=rank // per_node,
            device=devices[rank % per_node],
        )
        for rank in range(config.num_ranks)
    ]


def reporting_rank(config: ParallelConfig) -> int:
    """Returns the rank that sends results: the first one of the last stage, which samples."""
    return config.num_ranks - config.tensor_parallel_size
