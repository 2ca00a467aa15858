"""What a forward pass may know beside its inputs.

A captured graph takes no new arguments, so everything that changes from step to step reaches the
layers through this one guarded, module-level context, of which each thread has its own. What it
shares with the BatchDescriptor of protos/engine/v1/batch.proto has the same names;
`PROCESS_LOCAL_FIELDS` lists what never travels.

Lifecycle: `with forward_context(...)` sets it, `get_forward_context()` reads it, leaving the block
resets it. Nesting is a bug and fails.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from models.cudagraph_mode import CUDAGraphMode

PROCESS_LOCAL_FIELDS = frozenset({"kv_cache_data", "layer_attn_metadata", "no_compile_layers"})
"""Fields of ForwardContext that live in one process and have no counterpart on the wire."""

FP8_CACHE_DTYPE = torch.float8_e4m3fn
"""The dtype of keys and values that have scales beside them."""

WORKER_MADE_ATTENTION_FIELDS = frozenset({"block_tables", "slot_mapping", "groups", "workspace"})
"""Fields of AttentionMetadata that the worker derives from its tables; they do not travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Names one captured graph; the wire's GraphKey.

    graph_bs: requests that it has room for.
    """

    num_tokens: int
    graph_bs: int
    max_q_len: int
    uniform: bool
    is_draft: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is one graph, attention included; pieces do not mind how many requests."""
        return self.uniform or self.graph_bs < self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Shape of the batch.

    positions: [T] int64, position of each query token in its sequence; made by the worker from the
    sequence lengths, so it does not travel. The rest is the wire's Context.
    """

    positions: torch.Tensor
    is_prefill: bool
    batch_size: int
    graph_bs: int
    num_tokens: int
    max_q_len: int
    is_draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Neighbouring requests whose attention is computed in one call.

    G requests of Q query tokens each, L key positions: all single-token requests that stand next
    to each other, or one request with a longer chunk.

    first_token: index of the group's first query token; it owns the G * Q tokens from there.
    block_ids: [G * (L / B)] int32, blocks of each request in order, padded with the null block 0.
    mask: [G, 1, Q, L] bool, true where a query sees a key.
    """

    first_token: int
    num_requests: int
    num_queries: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorkspace:
    """What programs of attention share; one for all layers, graphs and steps.

    Made by `make_attention_workspace` of models.ops.attention.attention_metadata. Launches that
    share it must follow each other on one stream.

    partials: [n * D] float32, outputs of parts of a sequence's keys that the decode kernel adds up,
        one for each query head.
    lse: [n] float32, base-2 logarithm of each partial's sum of exponentials.
    counters: int32, parts that have finished of each request and kv head, or tickets drawn by
        hopper_attention; zero between launches.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """What attention needs. R requests, T query tokens.

    query_start_loc: [R + 1] int32, where each request's query tokens start; the last entry is T.
    seq_lens: [R] int32, tokens of each request, cached and query tokens together.
    row_ids: [R] int32, each request's row in the worker's tables.
    block_tables: [R, max_blocks] int32, block ids of each request, padded with the null block 0;
        max_blocks is what the longest sequence needs.
    slot_mapping: [T] int64, where each query token's key and value go: block id * B + offset.
    groups: how the reference attention splits the batch; made once a step, not once a layer.
        Empty where our kernels run, which plan on the device.
    max_seqlen_q, max_seqlen_k: longest query and longest sequence, in tokens.
    workspace: lets the decode kernel split long sequences; without one it does not.
    The worker makes block_tables, slot_mapping and groups from its tables with
    `models.ops.attention.attention_metadata.build_attention_metadata`; they do not travel.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    row_ids: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    groups: tuple[AttentionGroup, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    workspace: AttentionWorkspace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeMetadata:
    """Draft tokens that the step verifies.

    draft_token_ids: [D] int32. num_draft_tokens: [R] int32.
    """

    draft_token_ids: torch.Tensor
    num_spec_steps: int
    num_draft_tokens: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DPMetadata:
    """Token counts across data-parallel ranks: [ranks] int32."""

    num_tokens_across_dp: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheData:
    """One layer's cache: k and v, each [N blocks, B tokens, Hk heads, D].

    Every layer has tensors of its own: a view of one stacked tensor that a custom op mutates is
    written wrongly under Inductor with dynamic shapes. Must start finite (zeros): positions past
    a sequence's end get weight 0, and 0 * NaN is NaN.

    k_scale, v_scale: [N, B, Hk] float32, what each head of k and v, which are 8-bit floats then, is
        multiplied by; None: k and v are the numbers themselves.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, the null block included."""
        return self.k.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all there is, by name, each [N, B, ...]."""
        tensors = {"k": self.k, "v": self.v}
        if self.k_scale is not None and self.v_scale is not None:
            tensors |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheData:
    """One layer's cache with latent attention. What KVCacheData says holds here too.

    latent: [N blocks, B tokens, C + P], of each token the C numbers that keys and values are made
    from, and the P rotated ones that all heads' keys share.
    index_keys: [N, B, D], by which an indexer finds the token; None without one.
    """

    latent: torch.Tensor
    index_keys: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks there are, the null block included."""
        return self.latent.shape[0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all there is, by name, each [N, B, ...]."""
        if self.index_keys is None:
            return {"latent": self.latent}
        return {"latent": self.latent, "index_keys": self.index_keys}


CacheData = KVCacheData | LatentCacheData


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What a layer caches of every token, on one rank: a key and a value of each kv head."""

    num_heads: int
    """Query heads that read it."""
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns how much memory one token takes in a cache of some dtype."""
        scale_bytes = torch.float32.itemsize if dtype == FP8_CACHE_DTYPE else 0
        return 2 * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes)

    def allocate(
        self, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> KVCacheData:
        """Returns a zeroed cache, with scales if dtype is FP8_CACHE_DTYPE."""

        def allocate(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            shape = (num_blocks, block_size, self.num_kv_heads, *sizes)
            return torch.zeros(shape, dtype=dtype, device=device)

        k, v = allocate(self.head_dim), allocate(self.head_dim)
        if dtype != FP8_CACHE_DTYPE:
            return KVCacheData(k=k, v=v)
        scales = [allocate(dtype=torch.float32) for _ in range(2)]
        return KVCacheData(k=k, v=v, k_scale=scales[0], v_scale=scales[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCacheSpec:
    """What a layer with latent attention caches of every token; the same on all ranks."""

    num_heads: int
    """Query heads that read it."""
    latent_dim: int
    rope_dim: int
    index_dim: int = 0
    """Size of the key of an indexer; 0 without one."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Returns how much memory one token takes in a cache of some dtype."""
        return (self.latent_dim + self.rope_dim + self.index_dim) * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> LatentCacheData:
        """Returns a zeroed cache."""

        def allocate(size: int) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, size, dtype=dtype, device=device)

        return LatentCacheData(
            latent=allocate(self.latent_dim + self.rope_dim),
            index_keys=allocate(self.index_dim) if self.index_dim else None,
        )


CacheSpec = KVCacheSpec | LatentCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Everything a layer may ask for during one forward pass."""

    context: Context
    attn_metadata: AttentionMetadata
    kv_cache_data: list[CacheData]
    layer_attn_metadata: tuple[AttentionMetadata, ...] = ()
    """Each layer's, where layers differ in the blocks that they keep; empty where they do not.

    Only block_tables, slot_mapping and groups are not those of attn_metadata.
    """
    no_compile_layers: dict[int, Any] = field(default_factory=dict)
    """Layers that the compiler must not trace into, by layer index."""
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: SpecDecodeMetadata | None = None
    batch_descriptor: GraphKey | None = None
    """The graph to replay; `graph_key` on the wire."""
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE

    def metadata_of(self, layer_index: int) -> AttentionMetadata:
        """Returns what the attention of one layer needs."""
        if not self.layer_attn_metadata:
            return self.attn_metadata
        return self.layer_attn_metadata[layer_index]


class _Current(threading.local):
    """The context of the pass under way in a thread."""

    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the one that layers see, for the length of the block.

    Raises:
        RuntimeError: another forward pass is under way.
    """
    if _current.context is not None:
        raise RuntimeError("a forward context is already set; forward passes do not nest")
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def get_forward_context() -> ForwardContext:
    """Returns the context of the forward pass under way.

    Raises:
        RuntimeError: no forward pass is under way.
    """
    if _current.context is None:
        raise RuntimeError("no forward context is set; run the model inside forward_context()")
    return _current.context
