"""The host's memory below a worker's KV cache, at its start."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from models.loading.digest import checkpoint_digest
from services.engine.kv_cache.host_tier import DiskNews, HostLimits
from services.engine.kv_cache.prefix_index import PREFIX_KEY_VERSION
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.device import dtype_name
from services.engine.worker.start.kv_memory import available_host_bytes, check_host_memory
from services.engine.worker.start.loaded_model import LoadedModel
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.disk_store import DiskStore
from services.engine.worker.tiers.disk_tier import DiskTier
from services.engine.worker.tiers.host_memory import HostMemory, PlainHostMemory, measure_load_s
from services.engine.worker.tiers.pinned_memory import PinnedHostMemory
from services.processes.private_folder import ExposedFolderError

log = structlog.get_logger()

STEP_LOAD_BYTES = 128 * 2**20
"""Most that one step loads: 2.5 ms at 50 GB/s, which others' tokens may have to wait."""


def add_host_memory(
    loaded: LoadedModel, runner: ModelRunner, report_disk: Callable[[DiskNews], None]
) -> HostLimits | None:
    """Gives a runner its slots, if the configuration has any.

    All ranks get as many as the one that has room for least. Called before any block is in use.

    Args:
        loaded: the model.
        runner: its runner.
        report_disk: takes news of blocks on disk, in any thread.

    Returns:
        Their number, and how fast they are; None without any.

    Raises:
        ValueError: the memory is too small for one block, or there is less.
    """
    gigabytes, limits = loaded.config.cache.host_kv_gb, loaded.limits
    if not gigabytes:
        return None
    if not limits.shares_prefixes:
        raise ValueError(
            f"--host-kv-gb is {gigabytes:g}: it must be 0 for a model whose vectors are a "
            f"{limits.pooling} of all tokens, as none of them is left out"
        )
    blocks = BlockMemory(runner.kv_cache_data)
    num_slots = loaded.ranks.least(int(gigabytes * 2**30) // blocks.block_bytes)
    if not num_slots:
        raise ValueError(
            f"--host-kv-gb is {gigabytes:g}: a block has {blocks.block_bytes} bytes, so it must be "
            f"at least {blocks.block_bytes / 2**30:.3g}"
        )
    check_host_memory(
        num_slots * blocks.block_bytes, available_host_bytes(), "--host-kv-gb", "blocks on the host"
    )
    num_pages = 0 if limits.state_blocks is None else limits.state_blocks.num_each
    num_loads = loaded.ranks.least(max(1, num_pages, STEP_LOAD_BYTES // blocks.block_bytes))
    sizes = {"num_slots": num_slots, "max_step_loads": min(num_loads, num_slots)}
    host: HostMemory
    if loaded.device.type == "cuda":
        host = PinnedHostMemory(blocks, **sizes)
    else:
        host = PlainHostMemory(blocks, **sizes)
    block_load_s = measure_load_s(host, blocks.num_blocks)
    runner.host = host
    log.info(
        "host_memory_allocated",
        **sizes,
        block_bytes=blocks.block_bytes,
        total_mb=num_slots * blocks.block_bytes // 2**20,
        block_load_us=round(1e6 * block_load_s, 1),
    )
    entries = None
    if loaded.config.cache.disk_kv_dir is not None:
        store = _open_disk(loaded, blocks, loaded.config.cache.disk_kv_dir)
        entries = list(store.entries)
        host.disk = DiskTier(store, host.slots, report_disk)
    return HostLimits(**sizes, block_load_s=block_load_s, disk_entries=entries)


def _open_disk(loaded: LoadedModel, blocks: BlockMemory, parent: Path) -> DiskStore:
    """Opens the folder of this model's blocks.

    Raises:
        ValueError: another user can change it, or it cannot be made.
    """
    max_bytes = int(loaded.config.cache.disk_kv_gb * 2**30)
    parent = Path(os.path.realpath(parent.expanduser()))
    try:
        store = DiskStore(parent, identity=_identity(loaded, blocks), max_bytes=max_bytes)
    except (OSError, ExposedFolderError) as error:
        raise ValueError(f"--disk-kv-dir: {error}") from error
    log.info("disk_blocks_found", folder=str(store.folder), num_blocks=len(store.entries))
    return store


def _identity(loaded: LoadedModel, blocks: BlockMemory) -> bytes:
    """Returns a digest of all that the content of a block depends on, besides its tokens."""
    config, limits = loaded.config, loaded.limits
    checkpoint, draft = config.checkpoint, config.speculation.draft_model
    facts = (
        checkpoint_digest(checkpoint.model, checkpoint.load_format),
        "" if draft is None else checkpoint_digest(draft, checkpoint.load_format),
        PREFIX_KEY_VERSION,
        dtype_name(loaded.dtype),
        dtype_name(loaded.cache_dtype),
        checkpoint.quantization,
        checkpoint.model_impl,
        config.worker.batch_invariant,
        limits.block_size,
        limits.max_model_len,
        [(group.layers, group.window) for group in limits.layer_groups],
        limits.state_pages,
        limits.num_speculative_tokens,
        blocks.block_bytes,
        str(blocks.word),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def staging_bytes(loaded: LoadedModel) -> int:
    """Returns the device memory of the buffers between blocks and slots."""
    if not loaded.config.cache.host_kv_gb or loaded.device.type == "cpu":
        return 0
    return 2 * max(STEP_LOAD_BYTES, loaded.block_bytes * max(1, loaded.limits.num_state_blocks))
