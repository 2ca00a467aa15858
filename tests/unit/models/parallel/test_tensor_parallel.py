import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.parallel.group import SINGLE, ParallelGroup
from tests.support.random_checkpoints import transformers_logits
from tests.support.tensor_parallel_rank import TOKEN_IDS

ROOT = Path(__file__).parents[4]


def test_two_ranks_give_the_logits_of_transformers(checkpoint, tmp_path):
    folder, reference = checkpoint("llama_one_kv_head")
    outputs = [tmp_path / f"logits_{rank}.pt" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.tensor_parallel_rank", str(rank), "2"),
                *(str(folder), str(tmp_path / "rendezvous"), str(output)),
            ],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    expected = transformers_logits(reference, TOKEN_IDS)
    for output in outputs:
        torch.testing.assert_close(torch.load(output), expected, rtol=1e-4, atol=1e-4)


def test_one_rank_needs_no_process_group():
    tensor = torch.ones(2, 3)
    assert SINGLE.all_reduce(tensor) is tensor
    assert SINGLE.all_gather(tensor) is tensor


def test_unequal_shares_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="9 attention heads cannot be shared equally by 2 ranks"):
        ParallelGroup(rank=0, size=2).split(9, "attention heads")


def test_replicas_hold_the_same_share():
    group = ParallelGroup(rank=3, size=4)
    assert group.split(2, "kv heads", replicas=2) == 1
    with pytest.raises(ValueError, match="3 kv heads"):
        group.split(3, "kv heads", replicas=2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_group_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank is {rank}"):
        ParallelGroup(rank=rank, size=2)
