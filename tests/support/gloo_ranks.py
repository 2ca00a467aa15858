"""Processes on this machine that run one program as the ranks of a group over gloo."""

import os
from collections.abc import Iterable, Sequence

import torch

from tests.support.forked_program import ForkedProgram
from tests.support.forks import OF_SERVICES, fork_server

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
    run_commands(
        ["-c", MEET + program + LEAVE, str(rank), str(size), str(folder / "meeting"), str(output)]
        for rank, output in enumerate(outputs)
    )
    return [torch.load(output) for output in outputs]


def run_commands(commands: Iterable[Sequence[str]]) -> None:
    """Runs a rank for each command of a ForkedProgram; raises if one fails."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    server = fork_server(*OF_SERVICES)
    ranks = [ForkedProgram(server, command, environment=environment) for command in commands]
    try:
        assert [each.wait(timeout=120) for each in ranks] == [0] * len(ranks)
    finally:
        for each in ranks:
            each.kill()
