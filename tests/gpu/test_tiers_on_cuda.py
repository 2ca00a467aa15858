"""Blocks between a GPU and pinned memory: whole, in order, and without a change of any token."""

import ctypes
import random

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE, KVCacheSpec
from services.engine.batch import BatchDescriptor
from services.engine.kv_cache.host_tier import TierCopies
from services.engine.scheduler.tier_orders import pack_block_copies
from services.engine.worker.pinned_pages import PinnedPages
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.host_memory import measure_load_s
from services.engine.worker.tiers.pinned_memory import PinnedHostMemory
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.unit.engine.worker.tiers.test_tiered_engine import prompts_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE, MAX_LOADS = 64, 40, 16, 8
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
)
SIZES = {"max_model_len": 128, "block_size": 16, "num_blocks": 24, "device": "cuda"}
STATES = {"max_model_len": 256, "block_size": 16, "num_blocks": 20, "num_states": 7}


@pytest.fixture(params=[torch.bfloat16, FP8_CACHE_DTYPE], ids=str)
def caches(request):
    spec = KVCacheSpec(num_heads=8, num_kv_heads=8, head_dim=128)
    sizes = {"dtype": request.param, "device": CUDA}
    made = [spec.allocate(NUM_BLOCKS, BLOCK_SIZE, **sizes) for _ in range(12)]
    for cache in made:
        for tensor in cache.tensors().values():
            tensor.view(torch.uint8).random_(0, 100)
    return made


def content(caches, block):
    return [
        tensor.view(torch.uint8).view(NUM_BLOCKS, -1)[block].clone()
        for cache in caches
        for tensor in cache.tensors().values()
    ]


def orders(*, stored=(), loaded=()):
    copies = TierCopies(list(stored), [], list(loaded), [])
    return CopyOrders.read(
        BatchDescriptor(block_copies=pack_block_copies(copies)),
        num_blocks=NUM_BLOCKS,
        num_slots=NUM_SLOTS,
        max_loads=MAX_LOADS,
    )


def make_host(caches):
    return PinnedHostMemory(BlockMemory(caches), num_slots=NUM_SLOTS, max_step_loads=MAX_LOADS)


def test_more_blocks_than_a_buffer_holds_come_back(caches):
    host = make_host(caches)
    before = {block: content(caches, block) for block in range(1, 31)}
    # Slots in runs, out of order, and alone.
    slots = [*range(20, 35), 3, 1, *range(5, 16), 38, 17]
    host.copy(orders(stored=list(zip(before, slots, strict=True))))
    for cache in caches:
        for tensor in cache.tensors().values():
            tensor.view(torch.uint8).zero_()
    for first in range(0, 30, MAX_LOADS):
        pairs = [(slots[i], 60 - i) for i in range(first, min(first + MAX_LOADS, 30))]
        host.copy(orders(loaded=pairs))
    for i, block in enumerate(before):
        assert all(map(torch.equal, content(caches, 60 - i), before[block]))
    assert host.take_elapsed_us() > 0


def test_all_is_read_before_anything_is_written(caches):
    host = make_host(caches)
    first, second = content(caches, 1), content(caches, 2)
    host.copy(orders(stored=[(1, 0)]))
    host.copy(orders(stored=[(2, 0)], loaded=[(0, 2)]))
    assert all(map(torch.equal, content(caches, 2), first))
    host.copy(orders(loaded=[(0, 3)]))
    assert all(map(torch.equal, content(caches, 3), second))


def test_copies_keep_their_order_while_the_device_computes(caches):
    """A block is stored as the work queued before left it, and overwritten by the work after."""
    host = make_host(caches)
    part = next(iter(caches[0].tensors().values())).view(torch.uint8).view(NUM_BLOCKS, -1)
    work = torch.randn(4096, 4096, device=CUDA)
    for number in range(1, 40):
        for _ in range(3):
            work = (work @ work).clamp(-1, 1)
        part[5].fill_(number)
        host.copy(orders(stored=[(5, number)]))
        part[5].fill_(255)
        if number > 1:
            host.copy(orders(loaded=[(number - 1, 6)]))
            assert int(part[6].min()) == int(part[6].max()) == number - 1


def test_the_measured_time_of_a_load_is_that_of_a_bus(caches):
    host = make_host(caches)
    assert 0 < measure_load_s(host, NUM_BLOCKS) < 0.01


def test_pages_can_be_pinned_again_after_they_were_freed():
    for explicitly in (True, False, True):
        first, second = PinnedPages(1 << 20), PinnedPages(5000)
        assert (first.status, second.status) == (0, 0)
        assert not first.memory.any()
        source = torch.arange(1 << 18, dtype=torch.int32, device=CUDA).view(torch.uint8)
        first.memory.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(first.memory, source.cpu())
        if explicitly:
            first.free()
    refused = PinnedPages(4096)
    again = ctypes.c_void_p(refused.memory.data_ptr())
    assert ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2(again, ctypes.c_size_t(4096), 0)
    assert int(torch.ones(3, device=CUDA).sum()) == 3, "an error of pinning stays with its caller"


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        *((variant, {}) for variant in ("qwen3", "gemma3", "deepseek_v3")),
        *(
            (variant, {"cache_dtype": FP8_CACHE_DTYPE})
            for variant in ("qwen3", "gemma3", "deepseek_v3")
        ),
        *((variant, STATES) for variant in ("falcon_h1", "mamba2")),
    ],
)
def test_tokens_are_those_without_the_host(tmp_path, variant, options):
    sizes = SIZES | options
    write_checkpoint(tmp_path, variant, max_position_embeddings=sizes["max_model_len"])
    results = []
    for num_host_slots in (0, 600):
        engine = GraphEngine(tmp_path, GRAPHS, num_host_slots=num_host_slots, **sizes)
        engine.capture()
        order = random.Random(5)
        length = sizes["max_model_len"] - 50
        documents = [[order.randrange(90) for _ in range(length)] for _ in range(10)]
        results.append([engine.run(prompts_of(order, documents), 6) for _ in range(12)])
    assert engine.scheduler.counts.tiers.hit_tokens > 100
    assert results[0] == results[1]
