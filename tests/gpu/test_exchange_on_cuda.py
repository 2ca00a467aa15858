"""Collectives over memory of all ranks; the ranks are streams of one GPU.

A process of their own: its streams must not share a queue, or a rank's kernel waits for another's.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

MOST_S = 280


def run(call):
    """Runs a call of tests.support.ranks_on_one_gpu in another process."""
    program = f"import torch\nfrom tests.support import ranks_on_one_gpu as ranks\nranks.{call}"
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=MOST_S)


@pytest.mark.parametrize(
    ("num_ranks", "hidden", "numbers_of_rows", "dtype"),
    [
        # The last number takes two launches of a sum.
        (2, 512, (1, 7, 300), "float16"),
        (2, 2880, (1, 65), "bfloat16"),
        (2, 7168, (1, 33, 601), "bfloat16"),
        # With more ranks the last number takes the way of two shots.
        (4, 1536, (1, 5, 171), "float16"),
        (4, 7168, (3, 37), "bfloat16"),
        (8, 512, (1, 9, 257), "bfloat16"),
        (8, 7168, (1, 3, 19), "bfloat16"),
    ],
)
def test_ranks_get_the_bits_that_torch_computes(num_ranks, hidden, numbers_of_rows, dtype):
    run(f"compare_with_torch({num_ranks}, {hidden}, torch.{dtype}, {numbers_of_rows})")


def test_a_rank_that_does_not_take_part_is_named():
    run("miss_a_rank()")
