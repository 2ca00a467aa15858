"""Agreements of ranks over gloo."""

from tests.support.gloo_ranks import run_ranks

COMMON_FAULTS = """
from services.engine.config.parallel import ParallelConfig
from services.engine.worker.placement import rank_places
from services.engine.worker.start.ranks import Ranks

place = rank_places(ParallelConfig(tensor_parallel_size=size))[rank]
ranks = Ranks(place=place, host_group=dist.group.WORLD)
gather, exchanges = dist.all_gather, []

def counted(*args, **options):
    exchanges.append(1)
    return gather(*args, **options)

dist.all_gather = counted

def agreed(fault):
    exchanges.clear()
    return ranks.common_fault(fault), len(exchanges)

results = [agreed(""), agreed("a fault: \u00fc" if rank == 1 else ""), agreed("of each")]
"""


def test_a_fault_of_one_rank_is_that_of_all_and_none_takes_one_exchange(tmp_path):
    first, second = run_ranks(COMMON_FAULTS, 2, tmp_path)
    assert first == [("", 1), ("rank 1: a fault: \u00fc", 2), ("of each", 2)]
    assert second == [("", 1), ("a fault: \u00fc", 2), ("rank 0: of each", 2)]
