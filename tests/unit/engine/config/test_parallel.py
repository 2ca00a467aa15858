import pytest
from pydantic import ValidationError

from services.engine.config.engine_config import EngineConfig
from services.engine.config.parallel import ParallelConfig
from services.engine.worker.placement import rank_places


def test_ranks_take_the_first_gpus_or_those_of_the_list():
    places = rank_places(ParallelConfig(tensor_parallel_size=2))
    assert [(each.rank, each.tensor_parallel_rank, each.device) for each in places] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    listed = ParallelConfig(tensor_parallel_size=2, devices=[3, 1])
    assert [each.device for each in rank_places(listed)] == [3, 1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"devices": [0, 1]}, "lists 2 GPUs, and --tensor-parallel-size is 1"),
        ({"devices": [1, 1], "tensor_parallel_size": 2}, "lists a GPU twice"),
        ({"devices": [-1]}, "greater than or equal to 0"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"devices": [0], "device": "cpu"}, "--devices lists GPUs, and --device is cpu"),
        ({"num_redundant_experts": 2, "tensor_parallel_size": 2}, "experts is 2: it must be 0"),
        ({"eplb_interval": 9, "enable_expert_parallel": True}, "--eplb-interval is 9: it must be"),
    ],
)
def test_settings_that_do_not_fit_the_ranks_are_refused(flags, reason):
    with pytest.raises(ValidationError, match=reason):
        EngineConfig.from_flags(**flags)
