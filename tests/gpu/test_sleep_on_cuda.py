"""Sleep on a GPU: memory really goes back to the driver, and graphs stay valid."""

import pytest
import torch

from services.engine.core.sleep import SleepMode
from services.engine.worker.sleep.device_pages import DevicePages
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.step_driver import sampling

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MIB = 2**20
PROMPTS = [[5, 17, 3], list(range(40, 49)), [5, 17, 3, 8, 2, 7, 1], [9, 9, 4]]
MOST_SLEEPS = 10
"""Tries to see the memory come back: tests beside this one take some of the same GPU."""
SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
    "num_hidden_layers": 4,
    "head_dim": 128,
}
"""About 150 MB in bfloat16, enough to see."""


def free_bytes() -> int:
    """Returns the free memory of the whole GPU, as the driver counts it."""
    return torch.cuda.mem_get_info()[0]


def test_pages_go_back_to_the_driver_and_a_graph_reads_their_new_content():
    torch.zeros(1, device=CUDA)
    memory = DevicePages(CUDA, is_zeroed=False)
    values = memory.take(256 * MIB).view(torch.float32)
    small = memory.take(12).view(torch.float32)
    values.fill_(2.0)
    small.fill_(3.0)
    output = torch.empty(4, device=CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output.copy_(values[:4] * small[0])
    graph.replay()
    assert output.tolist() == [6.0] * 4
    addresses, freed = (values.data_ptr(), small.data_ptr()), []
    while len(freed) < MOST_SLEEPS and not any(freed):
        before = free_bytes()
        memory.release()
        freed.append(free_bytes() - before >= 256 * MIB)
        memory.restore()
    assert any(freed)
    assert (values.data_ptr(), small.data_ptr()) == addresses
    values.fill_(5.0)
    small.fill_(7.0)
    graph.replay()
    assert output.tolist() == [35.0] * 4
    memory.release()


def test_zeroed_pages_are_zeros_after_every_restore():
    torch.zeros(1, device=CUDA)
    memory = DevicePages(CUDA, is_zeroed=True)
    values = memory.take(5 * MIB)
    for _ in range(2):
        assert not values.any()
        values.fill_(1)
        memory.release()
        memory.restore()
    memory.release()


@pytest.mark.parametrize("form", ["plain", "fp8"])
async def test_an_engine_sleeps_and_replays_its_graphs_after_waking(tmp_path, form):
    write_checkpoint(tmp_path, "qwen3", **SMALL)
    config = ranks_config(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        enable_sleep=True,
        capture_while_serving=False,
        cudagraph_capture_sizes=[4],
        block_size=16,
        num_kv_blocks=20_000,
        **({"quantization": "fp8"} if form == "fp8" else {}),
    )
    greedy = sampling(max_tokens=20)
    async with ranks_core(config) as ranks:
        core = ranks.core
        expected = await ranks.generate(PROMPTS, greedy)
        num_graphs = len(core.stats().graphs.captured)
        assert num_graphs > 0
        for level in (1, 2):
            freed = []
            while len(freed) < MOST_SLEEPS and not any(freed):
                before = free_bytes()
                report = await core.sleep.fall_asleep(level, SleepMode.WAIT, 60.0)
                freed.append(free_bytes() - before >= 0.98 * report.num_bytes)
                await core.sleep.wake()
            assert any(freed)
            assert core.worker is not None
            num_cache_bytes = core.worker.block_bytes * core.worker.num_blocks
            num_weight_bytes = sum(each.bytes for each in core.worker.weights)
            assert report.num_bytes >= num_cache_bytes + num_weight_bytes
            num_replays = core.stats().counters.steps_by_dispatch()["graph"]
            assert await ranks.generate(PROMPTS, greedy) == expected
            assert core.stats().counters.steps_by_dispatch()["graph"] > num_replays
            assert len(core.stats().graphs.captured) == num_graphs
        assert len(ranks.executors) == 1
