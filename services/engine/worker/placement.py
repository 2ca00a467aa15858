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
    num_in_stage = config.data_parallel_size * config.tensor_parallel_size
    return [
        RankPlace(
            rank=rank,
            pipeline_parallel_rank=rank // num_in_stage,
            data_parallel_rank=rank % num_in_stage // config.tensor_parallel_size,
            tensor_parallel_rank=rank % config.tensor_parallel_size,
            node=rank // per_node,
            device=devices[rank % per_node],
        )
        for rank in range(config.num_ranks)
    ]


def reporting_ranks(config: ParallelConfig) -> range:
    """Returns the ranks that send results, one of each data-parallel rank, in order.

    They are the first ones of the last stage, which samples. The first of them also sends what all
    agree on, such as the next graph to capture.
    """
    size = config.tensor_parallel_size
    return range(config.num_ranks - config.data_parallel_size * size, config.num_ranks, size)
