import pytest
from pydantic import ValidationError

from services.engine.config.engine_config import EngineConfig
from services.engine.config.parallel import ParallelConfig
from services.engine.worker.placement import rank_places, reporting_ranks


def test_ranks_take_the_first_gpus_or_those_of_the_list():
    places = rank_places(ParallelConfig(tensor_parallel_size=2))
    assert [(each.rank, each.tensor_parallel_rank, each.device) for each in places] == [
        (0, 0, 0),
        (1, 1, 1),
    ]
    listed = ParallelConfig(tensor_parallel_size=2, devices=[3, 1])
    assert [each.device for each in rank_places(listed)] == [3, 1]


def test_the_ranks_of_a_stage_are_neighbours_and_the_last_stage_reports():
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    places = rank_places(config)
    assert [each.pipeline_parallel_rank for each in places] == [0, 0, 1, 1, 2, 2]
    assert [each.tensor_parallel_rank for each in places] == [0, 1, 0, 1, 0, 1]
    assert list(reporting_ranks(config)) == [4]
    assert list(reporting_ranks(ParallelConfig(tensor_parallel_size=2))) == [0]


def test_every_data_parallel_rank_reports():
    config = ParallelConfig(data_parallel_size=3, devices=[4, 2, 0])
    places = rank_places(config)
    assert [each.data_parallel_rank for each in places] == [0, 1, 2]
    assert [each.device for each in places] == [4, 2, 0]
    assert {(each.tensor_parallel_rank, each.pipeline_parallel_rank) for each in places} == {(0, 0)}
    assert list(reporting_ranks(config)) == [0, 1, 2]


def test_the_first_process_of_every_data_parallel_rank_reports():
    config = ParallelConfig(data_parallel_size=2, tensor_parallel_size=3)
    places = rank_places(config)
    assert [each.data_parallel_rank for each in places] == [0, 0, 0, 1, 1, 1]
    assert [each.tensor_parallel_rank for each in places] == [0, 1, 2] * 2
    assert list(reporting_ranks(config)) == [0, 3]


def test_the_ranks_of_a_node_are_neighbours_and_use_its_first_gpus():
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, num_nodes=2)
    assert [(each.node, each.device) for each in rank_places(config)] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip
    listed = ParallelConfig(tensor_parallel_size=4, num_nodes=2, devices=[3, 1])
    assert [each.device for each in rank_places(listed)] == [3, 1, 3, 1]


def test_several_hosts_on_loopback_need_no_secret():
    config = EngineConfig.from_flags(tensor_parallel_size=2, num_nodes=2, host="::1")
    assert config.parallel.ranks_per_node == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"devices": [0], "pipeline_parallel_size": 2}, "is 1 times --pipeline-parallel-size 2"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 8}, "is 128: it must be at most"),
        ({"pipeline_layers": [3, 3]}, "lists 2 stages, and --pipeline-parallel-size is 1"),
        ({"pipeline_layers": [0, 3], "pipeline_parallel_size": 2}, "greater than or equal to 1"),
        (
            {"pipeline_parallel_size": 2, "num_speculative_tokens": 2},
            "it must be 0 with --pipeline-parallel-size",
        ),
        ({"devices": [0], "data_parallel_size": 2}, "is 1 times --data-parallel-size 2"),
        ({"data_parallel_size": 16, "tensor_parallel_size": 8}, "is 128: it must be at most"),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 2},
            "--data-parallel-size is 2: it must be 1 with --pipeline-parallel-size 2",
        ),
        (
            {"data_parallel_size": 2, "batch_invariant": True, "num_redundant_experts": 1},
            "--num-redundant-experts is 1: it must be 0 with --batch-invariant",
        ),
        (
            {"all_reduce": "fused", "tensor_parallel_size": 2, "data_parallel_size": 4},
            "with --tensor-parallel-size 2 and --data-parallel-size 4, as its memory",
        ),
        (
            {"all_reduce": "fused", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "it must be auto or nccl with --tensor-parallel-size 2 and --pipeline-parallel-size 2",
        ),
        ({"devices": [0, 1]}, "lists 2 GPUs, and --tensor-parallel-size is 1"),
        ({"num_nodes": 2}, "1 processes cannot be shared equally by these hosts"),
        ({"num_nodes": 3, "tensor_parallel_size": 4}, "4 processes cannot be shared equally"),
        (
            {"num_nodes": 2, "tensor_parallel_size": 4, "devices": [0, 1, 2, 3]},
            "lists 4 GPUs, and --tensor-parallel-size is 4, on --num-nodes 2",
        ),
        (
            {"num_nodes": 2, "tensor_parallel_size": 2, "host": "0.0.0.0"},
            "needs --node-secret-file or --tls-client-ca",
        ),
        (
            {
                "num_nodes": 2,
                "tensor_parallel_size": 2,
                "host": "engine.internal",
                "node_secret_file": "secret",
            },
            "off loopback it needs --node-interface",
        ),
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
