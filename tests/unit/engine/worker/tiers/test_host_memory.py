"""Whole blocks of every kind of cache go to slots and come back, byte for byte."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE, KVCacheSpec, LatentCacheSpec
from models.loading.loader import load_model
from services.engine.batch import BatchDescriptor
from services.engine.kv_cache.cache_groups import group_layers
from services.engine.kv_cache.host_tier import TierCopies
from services.engine.scheduler.tier_orders import pack_block_copies
from services.engine.worker.start.kv_memory import allocate_kv_cache, block_bytes
from services.engine.worker.tiers import host_memory
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.copy_orders import CopyOrders
from services.engine.worker.tiers.host_memory import PlainHostMemory, measure_load_s
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE = 12, 6, 4


def fill(caches) -> None:
    torch.manual_seed(0)
    for cache in caches:
        for tensor in cache.tensors().values():
            tensor.view(torch.uint8).random_(0, 100)


def content(caches, block: int) -> list[torch.Tensor]:
    """All that any layer keeps in a block."""
    return [
        tensor.view(torch.uint8).view(NUM_BLOCKS, -1)[block].clone()
        for cache in caches
        for tensor in cache.tensors().values()
    ]


def orders(*, stored=(), loaded=(), num_blocks=NUM_BLOCKS, max_loads=4) -> CopyOrders:
    descriptor = BatchDescriptor(
        block_copies=pack_block_copies(TierCopies(list(stored), [], list(loaded), []))
    )
    return CopyOrders.read(
        descriptor, num_blocks=num_blocks, num_slots=NUM_SLOTS, max_loads=max_loads
    )


def specs(kind: str):
    dtype = torch.bfloat16
    if kind.endswith("fp8"):
        dtype = FP8_CACHE_DTYPE
    spec = KVCacheSpec(num_heads=4, num_kv_heads=3, head_dim=6)
    if kind.startswith("blocks"):
        spec = replace(spec, index_dim=5)
    if kind.startswith("latent"):
        spec = LatentCacheSpec(num_heads=4, latent_dim=24, rope_dim=6, index_dim=5)
    return [spec.allocate(NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=CPU) for _ in range(3)]


@pytest.fixture(
    params=[
        *("keys", "keys fp8", "blocks", "blocks fp8", "latent", "latent fp8"),
        *("falcon_h1", "gemma3", "mamba2"),
    ]
)
def caches(request, tmp_path):
    if " " in request.param or request.param in ("keys", "blocks", "latent"):
        made = specs(request.param)
    else:
        write_checkpoint(tmp_path, request.param)
        model = load_model(tmp_path, device=CPU, dtype=torch.float32)
        groups = group_layers(model.config.entry_windows(with_draft_layers=False), max_model_len=64)
        sizes = {"block_size": BLOCK_SIZE, "dtype": torch.float32, "groups": groups}
        made = allocate_kv_cache(model, num_blocks=NUM_BLOCKS, device=CPU, **sizes)
        assert BlockMemory(made).block_bytes == block_bytes(model, **sizes)
    fill(made)
    return made


def test_a_block_comes_back_into_any_other(caches):
    host = PlainHostMemory(BlockMemory(caches), num_slots=NUM_SLOTS, max_step_loads=4)
    before = content(caches, 3)
    host.copy(orders(stored=[(3, 5), (4, 0)]))
    fill(caches)
    for cache in caches:
        for tensor in cache.tensors().values():
            tensor.view(torch.uint8).view(NUM_BLOCKS, -1)[3] = 0
    others = content(caches, 8)
    host.copy(orders(loaded=[(5, 7)]))
    assert all(map(torch.equal, content(caches, 7), before))
    assert all(map(torch.equal, content(caches, 8), others))
    assert host.take_elapsed_us() >= 0


def test_all_is_read_before_anything_is_written(caches):
    host = PlainHostMemory(BlockMemory(caches), num_slots=NUM_SLOTS, max_step_loads=4)
    first, second = content(caches, 1), content(caches, 2)
    host.copy(orders(stored=[(1, 0)]))
    # Block 2 goes into the slot that is loaded into block 2.
    host.copy(orders(stored=[(2, 0)], loaded=[(0, 2)]))
    assert all(map(torch.equal, content(caches, 2), first))
    host.copy(orders(loaded=[(0, 3)]))
    assert all(map(torch.equal, content(caches, 3), second))


def test_the_measurement_leaves_blocks_as_they_are(caches):
    host = PlainHostMemory(BlockMemory(caches), num_slots=NUM_SLOTS, max_step_loads=4)
    before = [content(caches, block) for block in range(NUM_BLOCKS)]
    assert measure_load_s(host, NUM_BLOCKS) > 0
    for block, parts in enumerate(before):
        assert all(map(torch.equal, content(caches, block), parts))


def test_a_load_that_waited_for_the_processor_is_not_measured(monkeypatch):
    clock = Mock(perf_counter=Mock(side_effect=[0.0, 3.0, 4.0, 4.8, 6.0, 10.0]))
    monkeypatch.setattr(host_memory, "time", clock)
    assert measure_load_s(Mock(num_slots=6, max_step_loads=4), NUM_BLOCKS) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("copies", "found"),
    [
        ({"stored": [(12, 0)]}, "a copy of a block that does not exist"),
        ({"stored": [(1, 6)]}, "a copy of a slot that does not exist"),
        ({"loaded": [(-1, 1)]}, "a copy of a slot that does not exist"),
        ({"stored": [(1, 0), (2, 0)]}, "two copies into one slot"),
        ({"loaded": [(0, 1), (1, 1)]}, "two copies into one place"),
        ({"loaded": [(0, 0)]}, "a copy into the null block"),
        ({"loaded": [(slot, slot + 1) for slot in range(5)]}, "more than 4 blocks to load"),
    ],
)
def test_orders_that_contradict_themselves_are_refused(copies, found):
    with pytest.raises(ValueError, match=found):
        orders(**copies)


def test_a_step_without_copies_has_none():
    assert CopyOrders.read(BatchDescriptor(), num_blocks=2, num_slots=1, max_loads=1) is None
