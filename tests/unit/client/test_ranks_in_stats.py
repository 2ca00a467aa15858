from rich.console import Console

from protos.engine.v1.engine_pb2 import ExpertStats, GetStatsResponse, RankLoad
from protos.engine.v1.worker_pb2 import RankInfo
from services.client.commands import stats


def shown(ranks=(), **figures):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(stats._table("localhost:1", GetStatsResponse(ranks=ranks, **figures)))
    return capture.get()


def test_several_ranks_are_listed():
    ranks = [RankInfo(rank=n, device=f"cuda:{n}", pid=70 + n, num_blocks=9 + n) for n in range(2)]
    text = shown(ranks)
    assert "0 on cuda:0, process 70, 9 KV blocks; 1 on cuda:1, process 71, 10 KV blocks" in text
    assert "ranks" not in shown(ranks[:1])


def test_the_rank_that_starts_is_named():
    text = shown(uptime_s=7, worker_progress="rank 1: loading weights")
    assert "not ready, up 7 s; rank 1: loading weights" in text


def test_ranks_of_several_stages_name_them():
    ranks = [RankInfo(rank=n, device="cpu", pipeline_parallel_rank=n) for n in range(2)]
    text = shown(ranks)
    assert "0 (stage 0) on cpu" in text
    assert "1 (stage 1) on cpu" in text


def test_processes_of_data_parallel_ranks_name_them():
    loads = [RankLoad() for _ in range(2)]
    ranks = [RankInfo(rank=n, device="cpu", data_parallel_rank=n // 2) for n in range(4)]
    assert "2 (data-parallel rank 1) on cpu" in shown(ranks, rank_loads=loads)
    assert "data-parallel" not in shown(ranks[::2], rank_loads=loads)


def test_ranks_are_plain_in_json():
    ranks = GetStatsResponse(ranks=[RankInfo(rank=1, device="cpu")]).ranks
    (plain,) = stats._plain(ranks)
    assert (plain["rank"], plain["device"]) == (1, "cpu")


def test_the_load_of_whole_experts_is_shown():
    layers = [
        ExpertStats(expert_load=[3, 0, 1, 0], rank_load=[3, 1]),
        ExpertStats(expert_load=[0, 0, 0, 0], rank_load=[0, 0]),
        ExpertStats(expert_load=[1, 1, 1, 1], rank_load=[2, 2]),
    ]
    text = " ".join(shown(experts=layers, num_expert_moves=7).split())
    assert "4 in 3 layers, whole on 2 ranks" in text
    assert "1.25 times the mean load, 1.50 in the worst layer; 7 layers moved" in text
    assert "no tokens yet" in shown(experts=layers[1:2])
    assert "whole on" not in shown()


def test_the_load_of_each_data_parallel_rank_is_shown():
    loads = [RankLoad(num_running=2, num_waiting=n, num_free_blocks=7) for n in range(2)]
    text = shown(rank_loads=loads)
    assert "0: 2 running, 0 waiting, 7 KV blocks free; 1: 2 running, 1 waiting" in text
    assert "requests by rank" not in shown()


def test_images_are_listed_by_how_they_were_encoded():
    runs = {"graph": 5, "eager": 2}
    text = shown(num_encoded_images=7, num_found_images=3, images_by_run=runs)
    assert "7 encoded (2 eager, 5 graph), 3 found encoded" in text
    assert "images" not in shown()
