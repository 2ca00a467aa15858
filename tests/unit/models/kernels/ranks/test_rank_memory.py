"""Memory that all ranks write into."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from models.kernels.ranks.rank_memory import RankMemory, addresses_in


def test_slots_inside_a_larger_buffer_are_found_on_all_ranks():
    assert addresses_in([4096, 65536], 1, 65536 + 512) == (4096 + 512, 65536 + 512)


def test_slots_at_the_start_of_a_buffer_are_found_there():
    assert addresses_in([4096, 65536], 0, 4096) == (4096, 65536)


@pytest.fixture
def lone_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_socket_of_a_killed_process_with_this_number_is_no_obstacle(
    tmp_path, monkeypatch, lone_group
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    name = str(tmp_path / f"symm_mem-{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(name)
    with pytest.raises(RuntimeError):  # a CPU has no such memory
        RankMemory.of_group(
            lone_group, hidden_size=8, dtype=torch.bfloat16, device=torch.device("cpu")
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(name)
