"""Processes on this machine that run one program as the ranks of a group over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
MEET = """
import os
import sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
rank, size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
"""
LEAVE = """
torch.save(results, sys.argv[4])
dist.destroy_process_group()
os._exit(0)
"""
"""Without Python's own end: a thread of gloo that asks for Python's lock meanwhile would abort."""


def run_ranks(program, size, folder):
    """Returns the `results` that a program computes on each rank.

    Args:
        program: Python, may use `rank` and `size` and sets `results`.
        size: number of ranks.
        folder: for files.
    """
    outputs = [folder / f"{rank}.pt" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEET + program + LEAVE, str(rank), str(size),
             str(folder / "meeting"), str(output)],
            cwd=ROOT,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
    try:
        assert [each.wait(timeout=120) for each in ranks] == [0] * size
    finally:
        for each in ranks:
            each.kill()
    return [torch.load(output) for output in outputs]
