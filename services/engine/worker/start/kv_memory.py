"""The number of blocks of the KV cache, and their memory."""

import math
from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from models.kernels.attention.configurations import least_shared_bytes
from models.kernels.gpu import has_kernels
from models.kv_cache import CacheData, CacheSpec, KVCacheSpec, RowCacheSpec, TokenSpec
from models.layers.decoder import CausalLM
from models.state_cache import StateCacheData, StateSpec
from services.engine.config.cache import CacheConfig
from services.engine.kv_cache.cache_groups import LayerGroup
from services.engine.limits import StepLimits
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.warm_up import largest_step
from services.processes.address_space import address_space_left
from services.settings import host_memory

log = structlog.get_logger()

MIN_BLOCKS = 2
"""The null block and one for requests."""
_ALIGNMENT = 256
"""Bytes that the units of states are a multiple of, where no other layer decides their size."""

MAX_BLOCKS_FROM_MEMORY = 2**20
"""Most blocks sized from memory: a small model on a large GPU would get tens of millions of
blocks, and the scheduler keeps a record of each."""


def block_bytes(
    model: CausalLM,
    *,
    block_size: int,
    dtype: torch.dtype,
    groups: Sequence[LayerGroup] = (),
) -> int:
    """Returns the bytes of one block: all that a group of layers caches of its tokens in `dtype`.

    Without groups, all layers are one group. A model of states alone has blocks of a whole state.
    """
    specs = model.cache_specs()
    tokens, states = _token_specs(specs), _state_specs(specs)
    num_places = _num_places(groups, len(specs))
    sizes = _block_sizes(specs, groups, block_size)
    drafts = [spec for draft in model.draft_models for spec in draft.cache_specs()]
    if not tokens:
        return num_places * math.prod(_state_units(tokens, states, block_size, dtype))
    if _has_mixed_sizes(tokens, groups):
        num_regions, unit = _shared_unit(tokens, sizes, dtype)
        scales = [
            unit // own * (spec.block_bytes(size, dtype) - num_regions * own)
            for spec, size in zip(tokens, sizes, strict=True)
            for own in (spec.state_units(size, dtype)[1],)
        ]
        of_drafts = sum(each.block_bytes(block_size, dtype) for each in _token_specs(drafts))
        return num_regions * unit * num_places + sum(scales) + of_drafts
    if len(groups) > 1:
        tokens = tokens[:1] * num_places
    return sum(spec.block_bytes(block_size, dtype) for spec in tokens + _token_specs(drafts))


def state_pages(model: CausalLM, *, block_size: int, dtype: torch.dtype) -> int:
    """Returns the blocks of a state in each group of layers that keep states; or 0.

    Raises:
        ValueError: a block has no room for a row of a state.
    """
    specs = model.cache_specs()
    tokens, states = _token_specs(specs), _state_specs(specs)
    if not states:
        return 0
    units = _state_units(tokens, states, block_size, dtype)
    return max(spec.num_pages(*units) for spec in states)


def shared_prefix_tokens(
    wanted: int | None,
    specs: Sequence[CacheSpec],
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_queries: int = 1,
) -> int:
    """Returns the tokens that a shared prefix must save, to be read once; 0 to share none.

    Args:
        wanted: the tokens where they are configured; None: as the tables of a GPU say, and 0 on a
            CPU, where reading a prefix once saves nothing.
        specs: of the model's layers. Latent attention shares no prefixes.
        dtype: of the cache.
        device: of the cache.
        num_queries: of a request that decodes. With drafts and an 8-bit cache nothing is shared
            unless that is configured: each tile converts the keys (94 us instead of 78 for 32
            requests of 4 queries after 3,008 tokens, H200, 2026-11).
    """
    sizes = [each.bytes_per_token(dtype) for each in specs if isinstance(each, KVCacheSpec)]
    if not sizes or wanted is not None:
        return (wanted or 0) if sizes else 0
    if not has_kernels(device) or (num_queries > 1 and dtype.itemsize == 1):
        return 0
    return -(-least_shared_bytes(dtype, device) // min(sizes))


def allocate_kv_cache(
    model: CausalLM,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[LayerGroup] = (),
    num_state_slots: int = 1,
) -> list[CacheData]:
    """Returns each layer's cache, zeroed: masked attention multiplies unseen values by 0.

    The n-th layers of all groups share memory and use different blocks of it. The layers of draft
    models come last; each has a cache of its own, whose blocks are those of the first group.

    Raises:
        ValueError: sizes of layers that share memory are no multiples of one another.
    """
    specs = model.cache_specs()
    tokens, states = _token_specs(specs), _state_specs(specs)
    sizes = _block_sizes(specs, groups, block_size)
    place = {layer: layer for layer in range(len(specs))}
    if len(groups) > 1:
        place = {layer: place for group in groups for place, layer in enumerate(group.layers)}
    if states or _has_mixed_sizes(tokens, groups):
        if states:
            num_regions, unit_bytes = _state_units(tokens, states, block_size, dtype)
        else:
            num_regions, unit_bytes = _shared_unit(tokens, sizes, dtype)
        caches: list[CacheData] = []
        shared = [
            torch.zeros(num_regions, num_blocks, unit_bytes, dtype=torch.uint8, device=device)
            for _ in range(1 + max(place.values()))
        ]
        for layer, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
            memory = shared[place[layer]]
            if isinstance(spec, StateSpec):
                caches.append(StateCacheData(memory=memory, spec=spec, num_slots=num_state_slots))
            else:
                caches.append(
                    spec.allocate(num_blocks, size, memory=memory, dtype=dtype, device=device)
                )
    else:
        of_places = [
            tokens[number].allocate(num_blocks, block_size, dtype=dtype, device=device)
            for number in range(1 + max(place.values()))
        ]
        caches = [of_places[place[layer]] for layer in range(len(specs))]
    drafts = [
        spec.allocate(num_blocks, block_size, dtype=dtype, device=device)
        for draft in model.draft_models
        for spec in _token_specs(draft.cache_specs())
    ]
    return [*caches, *drafts]


def _has_mixed_sizes(tokens: Sequence[TokenSpec], groups: Sequence[LayerGroup]) -> bool:
    """Returns whether layers that share memory cache different sizes of a token."""
    return len(groups) > 1 and len(set(tokens)) > 1


def _block_sizes(
    specs: Sequence[CacheSpec], groups: Sequence[LayerGroup], block_size: int
) -> list[int]:
    """Returns the tokens of a block of each layer."""
    spans = {layer: group.span for group in groups for layer in group.layers}
    return [block_size * spans.get(layer, 1) for layer in range(len(specs))]


def _shared_unit(
    tokens: Sequence[TokenSpec], sizes: Sequence[int], dtype: torch.dtype
) -> tuple[int, int]:
    """Returns the regions of a block that serves layers of several sizes, and bytes of the largest.

    Raises:
        ValueError: they are no multiple of another layer's.
    """
    units = {spec.state_units(size, dtype) for spec, size in zip(tokens, sizes, strict=True)}
    largest = max(size for _, size in units)
    if all(isinstance(spec, RowCacheSpec) for spec in tokens):
        return 1, largest
    if any(parts != 2 or largest % size for parts, size in units):
        raise ValueError("layers with sliding windows cache something else than the others")
    return 2, largest


def _token_specs(specs: Sequence[CacheSpec]) -> list[TokenSpec]:
    return [spec for spec in specs if not isinstance(spec, StateSpec)]


def _state_specs(specs: Sequence[CacheSpec]) -> list[StateSpec]:
    return [spec for spec in specs if isinstance(spec, StateSpec)]


def _num_places(groups: Sequence[LayerGroup], num_layers: int) -> int:
    """Returns the layers whose memory is their own, the most of any group."""
    return max((len(group.layers) for group in groups), default=num_layers)


def _state_units(
    tokens: Sequence[TokenSpec],
    states: Sequence[StateSpec],
    block_size: int,
    dtype: torch.dtype,
) -> tuple[int, int]:
    """Returns the regions of a block that hold units of a state, and the bytes of a unit."""
    if tokens:
        return tokens[0].state_units(block_size, dtype)
    return 1, _ALIGNMENT * -(-max(spec.num_bytes for spec in states) // _ALIGNMENT)


def choose_num_blocks(
    config: CacheConfig,
    model: CausalLM,
    *,
    limits: StepLimits,
    dtype: torch.dtype,
    device: torch.device,
    graph_bytes: Callable[[ModelRunner], int],
    step_bytes: int | None = None,
    forward: Callable[..., Tensor] | None = None,
) -> int:
    """Returns the number of blocks by configuration or memory, the null block included.

    Args:
        config: the engine's; num_kv_blocks wins if set.
        model: loaded, on `device`.
        limits: the worker's.
        dtype: of the cache.
        device: of the cache.
        graph_bytes: measures the memory of graphs with a runner made for it.
        step_bytes: the result of `largest_step_bytes`, if measured.
        forward: computes hidden states; by default the model.

    Raises:
        ValueError: the memory is too small for one usable block.
    """
    bytes_each = block_bytes(
        model, block_size=limits.block_size, dtype=dtype, groups=limits.layer_groups
    )
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        if device.type == "cpu":
            available = config.kv_cache_memory_mb * 2**20
        else:
            runner = probe_runner(model, limits=limits, dtype=dtype, device=device)
            runner.forward.run_model = forward or model
            if step_bytes is None:
                step_bytes = largest_step_bytes(runner, limits)
            torch.cuda.synchronize(device)  # captures need an idle device
            needed = step_bytes + graph_bytes(runner)
            del runner
            available = _available_cuda_bytes(config.gpu_memory_utilization, needed, device)
        num_blocks = min(max(0, available) // bytes_each, MAX_BLOCKS_FROM_MEMORY)
    least = max(MIN_BLOCKS, 1 + limits.num_state_blocks + limits.num_groups)
    if num_blocks < least:
        raise ValueError(
            f"memory for the KV cache holds {num_blocks} blocks of {bytes_each} bytes; at least "
            f"{least} are needed. Raise kv_cache_memory_mb or gpu_memory_utilization, or "
            "lower max_num_batched_tokens."
        )
    num_tokens = limits.num_cache_tokens(num_blocks)
    if num_tokens < limits.max_model_len:
        log.warning(
            "kv_cache_fell_short_of_one_sequence",
            kv_cache_tokens=num_tokens,
            max_model_len=limits.max_model_len,
        )
    return num_blocks


def check_host_memory(
    num_bytes: int,
    num_available_bytes: int,
    flags: str = "--num-kv-blocks or --kv-cache-memory-mb",
    what: str = "the KV cache",
) -> None:
    """Checks that the host's memory has room for blocks, before they are allocated.

    Args:
        num_bytes: of the blocks.
        num_available_bytes: that the machine can still give.
        flags: which decide on the bytes.
        what: the blocks are.

    Raises:
        ValueError: they take more than the machine can still give.
    """
    if num_bytes > num_available_bytes:
        raise ValueError(
            f"{what} would take {num_bytes / 2**30:.1f} GiB, and this process can have "
            f"{num_available_bytes / 2**30:.1f} GiB more. Lower {flags}"
        )


def available_host_bytes() -> int:
    """Returns the memory that the host can still give to this process."""
    available = host_memory.available_host_bytes()
    left = address_space_left()
    return available if left is None else min(available, left)


def probe_runner(
    model: CausalLM, *, limits: StepLimits, dtype: torch.dtype, device: torch.device
) -> ModelRunner:
    """Returns a runner with only the null block, for steps of rows without blocks."""
    cache = allocate_kv_cache(
        model,
        num_blocks=1,
        block_size=limits.block_size,
        dtype=dtype,
        device=device,
        groups=limits.layer_groups,
        num_state_slots=limits.num_state_slots,
    )
    return ModelRunner(model, cache, limits=limits, device=device)


def largest_step_bytes(runner: ModelRunner, limits: StepLimits) -> int:
    """Runs the largest step on a GPU; returns the peak allocation, weights included."""
    torch.cuda.reset_peak_memory_stats(runner.device)
    runner.execute(largest_step(limits))
    if runner.forward.adapters is not None:
        with runner.forward.adding_adapters():
            runner.execute(largest_step(limits))
    if runner.encoder is not None:
        runner.encoder.encode_largest()
    return torch.cuda.max_memory_allocated(runner.device)


def _available_cuda_bytes(share: float, num_needed_bytes: int, device: torch.device) -> int:
    """Returns the unused part of a share of a GPU's memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Neither free nor ours: the CUDA context, libraries and other processes.
    foreign = total - free - torch.cuda.memory_reserved(device)
    log.info(
        "memory_profiled",
        needed_mb=num_needed_bytes // 2**20,
        foreign_mb=foreign // 2**20,
        total_mb=total // 2**20,
    )
    return int(total * share) - num_needed_bytes - foreign
