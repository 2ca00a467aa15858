"""The context of one forward pass: everything that layers know besides their inputs.

A captured graph takes no new arguments, so everything that changes from step to step reaches the
layers through this guarded, module-level context; each thread has its own. Fields that it shares
with the BatchDescriptor of protos/engine/v1/batch.proto have the same names; `PROCESS_LOCAL_FIELDS`
lists the fields that never travel.

`with forward_context(...)` sets it, `get_forward_context()` reads it, leaving the block resets it.
Nesting is a bug and raises.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.kv_cache import CacheData

PROCESS_LOCAL_FIELDS = frozenset(
    {
        "kv_cache_data",
        "layer_attn_metadata",
        "index_choice",
        "image_metadata",
        "sequence_ends",
        "adapter_slots",
    }
)
"""Fields of ForwardContext that live in one process and have no counterpart on the wire."""

WORKER_MADE_CONTEXT_FIELDS = frozenset({"positions"})
"""Fields of Context that do not travel."""

WORKER_MADE_ATTENTION_FIELDS = frozenset(
    {"block_tables", "slot_mapping", "groups", "chunks", "workspace", "prefix_plan"}
)
"""Fields of AttentionMetadata that the worker derives from its tables; they do not travel."""

TILE_QUERIES = 16
"""Most query tokens of a tile of a PrefixPlan; each has a row for every head of a kv head."""
MAX_PREFIX_TILES = 64
"""Tiles of a PrefixPlan."""
MAX_PREFIX_LEVELS = 3
"""Most prefixes of one request, each of which continues the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Names one captured graph; the wire's GraphKey.

    graph_bs: requests that it has room for.
    shares_prefixes: whether it reads the keys of a PrefixPlan once for all of their requests.
    skips_adapters: whether it is for steps without adapters, of a model with room for some.
    """

    kind: GraphKind
    num_tokens: int
    graph_bs: int
    max_q_len: int
    shares_prefixes: bool = False
    skips_adapters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Shape of the batch.

    positions: [T] int64, position of each query token in its sequence; made by the worker. The
        other fields are the wire's Context.
    """

    positions: torch.Tensor
    is_prefill: bool
    batch_size: int
    num_tokens: int
    max_q_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Neighbouring requests whose attention is computed in one call.

    G requests of Q query tokens each, L key positions: a run of single-token requests, or one
    longer chunk.

    first_token: index of the group's first query token.
    block_ids: [G * (L / B)] int32, blocks of each request in order, padded with block 0.
    mask: [G, 1, Q, L] bool, true where a query sees a key.
    """

    first_token: int
    num_requests: int
    num_queries: int
    block_ids: torch.Tensor
    mask: torch.Tensor

    @property
    def tokens(self) -> slice:
        """The group's query tokens among the step's."""
        return slice(self.first_token, self.first_token + self.num_requests * self.num_queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """A request of a step with several query tokens, as the host knows it.

    request: its number in the step. first_token: index of its first query token among the step's.
    num_queries: its query tokens. num_keys: at least its cached and query tokens.
    """

    request: int
    first_token: int
    num_queries: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorkspace:
    """Memory that programs of attention share; one for all layers, graphs and steps of one stream.

    partials: [n * D] float32, outputs for parts of a sequence's keys, one for each query head.
    lse: [n] float32, base-2 logarithm of each partial's sum of exponentials.
    counters: int32, finished parts of each request and kv head, or tickets of hopper_attention;
        zero between launches.
    prefix_partials, prefix_lse: partials and lse of shared prefixes; None where none are shared.
    """

    partials: torch.Tensor
    lse: torch.Tensor
    counters: torch.Tensor
    prefix_partials: torch.Tensor | None = None
    prefix_lse: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """Leading keys that decoding requests of a step share. R requests.

    Its sizes do not depend on what is shared, so the plans of all replays of a graph are data.
    A tile is up to TILE_QUERIES query tokens that all see the same keys in a range of positions.
    The queries of a prefix follow one another in its tiles, those of a request, too. The first
    prefix of a request begins at position 0 and each other one where that before ends.

    tiles: [5, MAX_PREFIX_TILES] int32: each tile's first entry in `queries`, its queries, the first
        key that they share, how many these are, and a request whose blocks have these keys; zeros
        of absent tiles, which come last.
    queries: int32, the query tokens of all tiles, by their numbers in the step.
    tile_slots: [R, MAX_PREFIX_LEVELS + 1] int32, for each prefix of a request
        tile * TILE_QUERIES + place in the tile of its first query, then -1.
    own_lens: [R] int32, the keys of each request that it does not share.
    num_queries: most query tokens of a request that shares keys.
    """

    tiles: torch.Tensor
    queries: torch.Tensor
    tile_slots: torch.Tensor
    own_lens: torch.Tensor
    num_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The step's metadata for attention. R requests, T query tokens.

    query_start_loc: [R + 1] int32, where each request's query tokens start; the last entry is T.
    seq_lens: [R] int32, cached and query tokens of each request.
    row_ids: [R] int32, each request's row in the worker's tables.
    block_tables: [R, max_blocks] int32, block ids of each request, padded with block 0; of layers
        that keep a state, its pages.
    slot_mapping: [T] int64, the slot of each query token's key and value: block id * B + offset.
    groups: how the reference attention splits the batch; empty with our kernels, which plan on the
        device.
    chunks: the requests with several query tokens, in order; empty where the host does not know
        them: in recorded steps and in passes of draft layers.
    max_seqlen_q, max_seqlen_k: longest query and longest sequence, in tokens.
    workspace: lets the decode kernel split long sequences.
    prefix_plan: leading keys that are read once for several requests; None: each reads its own.
    The worker makes block_tables, slot_mapping, groups, chunks and prefix_plan; they do not travel.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    row_ids: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    groups: tuple[AttentionGroup, ...]
    max_seqlen_q: int
    max_seqlen_k: int
    chunks: tuple[PromptChunk, ...] = ()
    workspace: AttentionWorkspace | None = None
    prefix_plan: PrefixPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeMetadata:
    """Draft tokens that the step verifies.

    draft_token_ids: [D] int32. num_draft_tokens: [R] int32. num_next_drafts: to guess after it.
    """

    draft_token_ids: torch.Tensor
    num_spec_steps: int
    num_draft_tokens: torch.Tensor
    num_next_drafts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DPMetadata:
    """Token counts across data-parallel ranks.

    num_tokens_across_dp: [ranks] int32, query tokens of each rank. All ranks compute as many rows:
        the most of any rank, or those of the graph that all replay.
    num_sampling_across_dp: [ranks] int32, requests of each rank that sample; with drafts only. In
        a draft pass of one token of each, they are the query tokens as well.
    """

    num_tokens_across_dp: torch.Tensor
    num_sampling_across_dp: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMetadata:
    """Images in a pass of T query tokens; buffers may have room for more.

    rows: [n, features] vectors of the encoder, of the model's dtype; features = hidden * (1 +
        number of deepstack levels).
    index: [T'] int32, the row of each token that the pass embeds, which in draft passes are the
        successors of query tokens; -1 for tokens without. None: no token of the pass has one.
    rope_positions: [3, T'] int64, position of each query token in time, height and width; None
        for a model without M-RoPE.
    key_ends: [T] int32, position after the last key that each query token sees: that of its image's
        last token, else its own. None: all see keys up to their own.
    only_windows_see_later: whether key_ends are those of layers with a sliding window alone.
    """

    rows: torch.Tensor
    index: torch.Tensor | None
    rope_positions: torch.Tensor | None
    key_ends: torch.Tensor | None = None
    only_windows_see_later: bool = False

    def key_ends_of(self, sliding_window: int | None) -> torch.Tensor | None:
        """Returns the key_ends of layers with a sliding window, or of those without (None)."""
        is_causal = sliding_window is None and self.only_windows_see_later
        return None if is_causal else self.key_ends


@dataclass(slots=True)
class IndexChoice:
    """Choice of the last indexer of a pass, for later layers that attend to the same tokens.

    positions: [T, top_k] int32, with our kernels; None if every token is attended to.
    masks: with the reference, of each group [G, 1, Q, L] bool.
    """

    positions: torch.Tensor | None = None
    masks: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Everything a layer may read during one forward pass."""

    context: Context
    attn_metadata: AttentionMetadata
    kv_cache_data: list[CacheData]
    layer_attn_metadata: tuple[AttentionMetadata, ...] = ()
    """Each layer's metadata, if layers keep different blocks; else empty.

    Only block_tables, slot_mapping and groups differ from attn_metadata.
    """
    index_choice: IndexChoice = field(default_factory=IndexChoice)
    dp_metadata: DPMetadata | None = None
    spec_decode_metadata: SpecDecodeMetadata | None = None
    """Set in the passes of draft layers only."""
    image_metadata: ImageMetadata | None = None
    """None: all tokens are text, and have the same position in time, height and width."""
    adapter_slots: torch.Tensor | None = None
    """[at least T] int32: 0 for a token without an adapter, n + 1 for the one in slot n; None where
    no token of the step has one, or the model has no room for adapters."""
    sequence_ends: torch.Tensor | None = None
    """[T] int32, the length of each query token's sequence, in a pass whose tokens see later ones
    of their sequences; else None."""
    batch_descriptor: GraphKey | None = None
    """The graph to replay; `graph_key` on the wire."""
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE

    def __post_init__(self) -> None:
        """Raises ValueError if a mode is that of no single pass, or graphs run without a key."""
        mode = self.cudagraph_runtime_mode
        if not mode.is_valid_runtime_mode():
            raise ValueError(f"{mode} is the mode of several kinds of steps, not of one pass")
        if mode and self.batch_descriptor is None:
            raise ValueError(f"a pass in mode {mode} needs the key of its graph")

    def metadata_of(self, layer_index: int) -> AttentionMetadata:
        """Returns the metadata of one layer."""
        if not self.layer_attn_metadata:
            return self.attn_metadata
        return self.layer_attn_metadata[layer_index]

    def key_ends(self, sliding_window: int | None) -> torch.Tensor | None:
        """Returns the position after the last key that each query token sees, [T] int32.

        None: all see keys up to their own. A window reaches as far to later keys as to earlier
        ones.
        """
        ends = self.sequence_ends
        if ends is None:
            images = self.image_metadata
            return None if images is None else images.key_ends_of(sliding_window)
        if sliding_window is None:
            return ends
        reached = self.context.positions[: len(ends)] + sliding_window
        return torch.minimum(ends, reached.to(ends.dtype))


class _Current(threading.local):
    """The context of the forward pass that runs in a thread."""

    context: ForwardContext | None = None


_current = _Current()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Sets the context that layers read, for the length of the block.

    Raises:
        RuntimeError: another forward pass is running.
    """
    if _current.context is not None:
        raise RuntimeError("a forward context is already set; forward passes do not nest")
    _current.context = context
    try:
        yield
    finally:
        _current.context = None


def get_forward_context() -> ForwardContext:
    """Returns the context of the running forward pass.

    Raises:
        RuntimeError: there is none.
    """
    if _current.context is None:
        raise RuntimeError("no forward context is set; run the model inside forward_context()")
    return _current.context


def slots_of_step() -> torch.Tensor | None:
    """Returns adapter_slots of the running forward pass.

    None without a pass, too: the kernels of a compiled piece are tuned before any.
    """
    return None if _current.context is None else _current.context.adapter_slots
