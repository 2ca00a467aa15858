"""The graphs that a worker captures: the configured ones that model and device support."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import GraphKey
from models.ops.attention.cudagraph_support import AttentionCGSupport
from services.engine import batch
from services.engine.config.compilation_level import CompilationLevel

log = structlog.get_logger()

FEW_REQUESTS, MANY_REQUESTS = 32, 256
"""Requests of the graphs of steps with prompts that have no room for all.

Attention starts programs for all requests of a graph, used or not. One prompt of 128 tokens took
1352 us with room for one, 1433 with room for 32, and 2700 instead of 1929 for 256 with 512 tokens
(H200, Qwen3-0.6B, 2026-11).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSupport:
    """The graphs that can be captured.

    full_decode: whole decode steps, attention included. pieces: the model around its attention.
    prompts: any whole step, attention included. limits: why others cannot, one clause each.
    """

    full_decode: bool
    pieces: bool
    prompts: bool = False
    limits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChoice:
    """The mode of a worker's graphs; `reason` says why it is not the wanted one, if it is not."""

    mode: CUDAGraphMode
    reason: str = ""


def graph_support(
    attention: AttentionCGSupport,
    level: CompilationLevel,
    *,
    decode_q_len: int,
    on_cpu: bool,
) -> GraphSupport:
    """Returns the graphs that can be captured.

    Args:
        attention: support of the layer that supports least.
        level: how much of the model is compiled.
        decode_q_len: query tokens of each request in a decode step.
        on_cpu: operations are taped on a CPU.
    """
    limits = []
    # At level 1 Dynamo takes part in every step, and it does not run where operations are observed.
    is_observable = level != CompilationLevel.DYNAMO_AS_IS
    if not is_observable:
        limits.append("level 1 is traced in every step, which only graphs of decodes on CUDA allow")
    needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if decode_q_len > 1:
        needed = AttentionCGSupport.UNIFORM_BATCH
    if attention < needed:
        limits.append(
            f"attention supports {attention.name}, graphs of decodes with {decode_q_len} tokens "
            f"per request need {needed.name}"
        )
    elif attention < AttentionCGSupport.ALWAYS:
        limits.append(
            f"attention supports {attention.name}, whole graphs of steps with prompts need ALWAYS"
        )
    return GraphSupport(
        full_decode=attention >= needed and (is_observable or not on_cpu),
        pieces=is_observable,
        prompts=is_observable and attention is AttentionCGSupport.ALWAYS,
        limits=tuple(limits),
    )


def supported_mode(wanted: CUDAGraphMode, support: GraphSupport) -> ModeChoice:
    """Returns the supported mode closest to the wanted one; logs a warning if they differ.

    FULL, the default, includes whole steps with prompts only if supported. Decodes without whole
    graphs run in pieces; then all other steps do too, as they share sizes.
    """
    full_steps = wanted is CUDAGraphMode.FULL and not support.prompts
    closest = CUDAGraphMode.FULL_AND_PIECEWISE if full_steps else wanted
    pieces = CUDAGraphMode.PIECEWISE if support.pieces else CUDAGraphMode.NONE
    full = CUDAGraphMode.FULL if support.full_decode else pieces
    substitute = {
        CUDAGraphMode.NONE: CUDAGraphMode.NONE,
        CUDAGraphMode.PIECEWISE: pieces,
        CUDAGraphMode.FULL: full,
    }
    decode = substitute[closest.decode_mode()]
    mixed = substitute[closest.mixed_mode()]
    if decode is CUDAGraphMode.PIECEWISE or decode is mixed:
        mode = decode
    else:
        mode = CUDAGraphMode((decode.value, mixed.value))
    if mode is wanted:
        return ModeChoice(mode=mode)
    reason = f"{wanted} became {mode}: {'; '.join(support.limits)}"
    log.warning("graph_mode_downgraded", wanted=str(wanted), mode=str(mode), reason=reason)
    return ModeChoice(mode=mode, reason=reason)


def full_decode_key(batch_size: int, q_len: int = 1) -> GraphKey:
    """Returns the key of a whole decode step, `q_len` query tokens per request."""
    return GraphKey(
        kind=GraphKind.DECODE,
        num_tokens=batch_size * q_len,
        graph_bs=batch_size,
        max_q_len=q_len,
    )


def mixed_keys(num_tokens: int, max_num_seqs: int) -> list[GraphKey]:
    """Returns the keys of whole steps with prompts of `num_tokens` tokens.

    One holds the most requests possible; others hold fewer, half of these at most.
    """
    most = min(max_num_seqs, num_tokens - 1)
    rooms = [most, *(room for room in (MANY_REQUESTS, FEW_REQUESTS) if 2 * room <= most)]
    return [
        GraphKey(kind=GraphKind.MIXED, num_tokens=num_tokens, graph_bs=room, max_q_len=num_tokens)
        for room in rooms
        if room
    ]


def piecewise_key(num_tokens: int) -> GraphKey:
    """Returns the key of the graphs of all pieces between attention layers."""
    return GraphKey(
        kind=GraphKind.PIECEWISE,
        num_tokens=num_tokens,
        graph_bs=num_tokens,
        max_q_len=num_tokens,
    )


def encoder_key(num_patches: int) -> GraphKey:
    """Returns the key of the encoder over some patches, of any number of images."""
    return GraphKey(
        kind=GraphKind.ENCODER, num_tokens=num_patches, graph_bs=num_patches, max_q_len=num_patches
    )


def planned_keys(
    mode: CUDAGraphMode,
    *,
    decode_sizes: tuple[int, ...],
    token_sizes: tuple[int, ...],
    max_num_seqs: int,
    decode_q_lens: Sequence[int] = (1,),
) -> list[GraphKey]:
    """Returns the graphs to capture: whole decode steps first, larger ones of a kind first.

    Args:
        mode: a supported one.
        decode_sizes: batch sizes of whole decode steps.
        token_sizes: query tokens of other steps.
        max_num_seqs: most requests in a step.
        decode_q_lens: query tokens of each request in a decode step, one of these.
    """
    descending = sorted(token_sizes, reverse=True)
    keys = []
    if mode.decode_mode() is CUDAGraphMode.FULL:
        keys += [
            full_decode_key(size, q_len)
            for q_len in sorted(decode_q_lens, reverse=True)
            for size in sorted(decode_sizes, reverse=True)
        ]
    if mode.mixed_mode() is CUDAGraphMode.FULL:
        keys += [key for size in descending for key in mixed_keys(size, max_num_seqs)]
    if mode.requires_piecewise_compilation():
        keys += [piecewise_key(size) for size in descending]
    return keys


def sharing_keys(keys: Sequence[GraphKey], *, least_requests: int) -> list[GraphKey]:
    """Returns the keys of planned whole steps whose requests share prefixes.

    least_requests: fewest requests of a step that shares some.
    """
    return [
        replace(key, shares_prefixes=True)
        for key in keys
        if key.kind in (GraphKind.DECODE, GraphKind.MIXED) and key.graph_bs >= least_requests
    ]


def adapter_free_keys(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Returns the keys of whole steps in which no request has an adapter."""
    return [
        replace(key, skips_adapters=True)
        for key in keys
        if key.kind in (GraphKind.DECODE, GraphKind.MIXED)
    ]


def with_draft_keys(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Adds the draft graphs of planned decode graphs, after these; all forms of one share it."""
    decodes = [key for key in keys if key.kind is GraphKind.DECODE]
    return [*decodes, *dict.fromkeys(map(draft_key, decodes)), *keys[len(decodes) :]]


def draft_key(key: GraphKey) -> GraphKey:
    """Returns the key of the draft graph after a graph of decodes, the same for all its forms."""
    return replace(key, kind=GraphKind.DRAFT, shares_prefixes=False, skips_adapters=False)


def wire_key(key: GraphKey) -> batch.GraphKey:
    """Returns a key in its wire form."""
    return batch.GraphKey(
        kind=batch.GraphKind.Name(key.kind),
        num_tokens=key.num_tokens,
        graph_bs=key.graph_bs,
        max_q_len=key.max_q_len,
        shares_prefixes=key.shares_prefixes,
        skips_adapters=key.skips_adapters,
    )


def read_key(key: batch.GraphKey) -> GraphKey:
    """Returns a key from its wire form.

    Raises:
        ValueError: its kind is missing or unknown.
    """
    return GraphKey(
        kind=GraphKind(key.kind),
        num_tokens=key.num_tokens,
        graph_bs=key.graph_bs,
        max_q_len=key.max_q_len,
        shares_prefixes=key.shares_prefixes,
        skips_adapters=key.skips_adapters,
    )
