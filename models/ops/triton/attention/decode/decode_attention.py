"""Paged attention of single-token queries; several programs share the keys of a sequence."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from models.forward_context import AttentionMetadata
from models.kv_cache import KVCacheData
from models.ops.operands.base_two import LOG2_E
from models.ops.operands.head_transform import HeadTransform
from models.ops.triton.attention.cache.cache_scales import cache_scales
from models.ops.triton.attention.configurations import (
    EARLY_REQUESTS,
    Tiles,
    decode_tiles,
    least_part,
    num_dealt,
    num_splits,
)
from models.ops.triton.attention.decode.keys_of_8_bits import (
    attend_keys_of_8_bits,
    in_float16,
    load_tile,
)
from models.ops.triton.attention.decode.newest_token import (
    attend_newest,
    load_gains,
    partners_of,
    repeated,
)
from models.ops.triton.attention.key_parts import add_part, deal_keys, seen_keys, split_keys
from models.ops.triton.attention.online_softmax import (
    attend_keys,
    fold_tile,
    load_keys,
    see_nothing,
    see_sinks,
)
from models.ops.triton.attention.store_heads import store_heads
from models.ops.triton.attention.uniform_values import uniform
from models.ops.triton.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.ops.triton.launching.launch import Launch

_MOST_AT_ONCE = 8
_AT_ONCE_PER_WARP = 2048
"""Most partial results that are read together, and the elements of them that a warp holds: twice as
many cost the loop over keys of one warp registers."""
_MOST_GATHERED = 4
"""Most rows of heads for each warp whose loads are all waited for together: registers."""

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "slots_ptr", "table_stride",
    "num_splits", "output_scale_stride", "q_stride", "new_k_stride", "new_v_stride",
    "rotation_stride",
]  # fmt: skip  # specialising on these would compile again while serving


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """A step's keys and values before they are transformed and stored.

    k, v: [T, Hk, D], each token's heads contiguous, tokens whole heads apart.
    transform: of queries and keys.
    slot_mapping: [T] int64.
    """

    k: torch.Tensor
    v: torch.Tensor
    transform: HeadTransform
    slot_mapping: torch.Tensor


@triton.jit(do_not_specialize=_VARYING)
def _decode_kernel(  # noqa: C901, PLR0912, PLR0915  # one launch, from projections to the heads' outputs
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, output_ptr, output_scale_ptr,
    block_tables_ptr, seq_lens_ptr, query_start_ptr, partials_ptr, lse_ptr, counters_ptr,
    new_k_ptr, new_v_ptr, slots_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, sinks_ptr,
    table_stride, num_splits, output_scale_stride, q_stride, new_k_stride, new_v_stride,
    rotation_stride, scale_log2, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ONLY_SINGLE_TOKENS: tl.constexpr, HAS_NEW: tl.constexpr,
    HAS_NORM: tl.constexpr, AT_ONCE: tl.constexpr, PADDED_GROUP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, STARTS_NEXT_LATE: tl.constexpr,
    IS_SPLIT: tl.constexpr, HEAD_ROWS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HELD_KEYS: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, LEAST_PART: tl.constexpr, READS_WORDS: tl.constexpr,
    GATHERS: tl.constexpr, DEPENDENT: tl.constexpr, DEALT: tl.constexpr,
):  # fmt: skip
    """Attends the GROUP query heads of one kv head of one request to one part of its keys.

    HAS_NEW: transforms the queries and the newest key. The program of the last part stores that key
        and its value; no other program needs them.
    READS_WORDS: takes the loop of keys_of_8_bits.
    GATHERS: see attend_newest.
    """
    if not HAS_NEW:
        wait_for_previous(DEPENDENT)
    kv_head = tl.program_id(0)
    # The loop over keys of 8 bits leaves a thread no registers for the place of its part.
    SHARES: tl.constexpr = HAS_SCALES and HAS_ASSEMBLY
    # Without parts a program saves the registers that adding them up takes.
    active = 1
    # Parts that only long sequences have start last.
    if DEALT > 0:
        dealt_request, split, part, active, num_before = deal_keys(
            tl.program_id(1), tl.num_programs(1) - DEALT, seq_lens_ptr, query_start_ptr, WINDOW,
            DEALT, KEYS, LEAST_PART, ONLY_SINGLE_TOKENS, HAS_NEW, SHARES,
        )  # fmt: skip
        if split >= active:
            return
        request = dealt_request.to(tl.int64)
    else:
        request = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)
    token = request
    if not ONLY_SINGLE_TOKENS:
        token = tl.load(query_start_ptr + request).to(tl.int64)
        if tl.load(query_start_ptr + request + 1) - token != 1:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    if DEALT > 0:
        seq_len = uniform(seq_len, SHARES)
    start, end = seen_keys(seq_len, WINDOW)
    if HAS_NEW:
        # The newest key is seen while it is in registers: no thread waits for it to be stored.
        end -= 1
    if IS_SPLIT and DEALT == 0:
        if split > 0 and split * LEAST_PART >= end - start:
            return
        part, active = split_keys(
            end - start, num_splits, seq_lens_ptr, NUM_KV_HEADS, WINDOW, NUM_PROGRAMS, KEYS,
            LEAST_PART,
        )  # fmt: skip
        if split >= active:
            return
    if IS_SPLIT:
        start += split * part
        end = tl.minimum(start + part, end)

    dims = tl.arange(0, BLOCK_D)
    table_ptr = block_tables_ptr + request * table_stride
    pointers = (k_ptr, v_ptr, k_scale_ptr, v_scale_ptr)
    held_tile = None
    # All but the newest keys are from earlier steps: load them while the queries are computed.
    if READS_WORDS and HELD_KEYS > 0:
        held_keys = start + tl.arange(0, HELD_KEYS)
        held_tile = load_tile(
            held_keys, held_keys < end, table_ptr, pointers, kv_head, dims,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D,
        )  # fmt: skip
    elif HELD_KEYS > 0:
        held_k, held_v = load_keys(
            start, end, table_ptr, k_ptr, v_ptr, kv_head, dims,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HELD_KEYS,
        )  # fmt: skip
    partners = partners_of(dims, HEAD_DIM)
    # Heads of the group repeat, so that a warp holds every head that it computes.
    heads = tl.arange(0, HEAD_ROWS) % PADDED_GROUP
    in_group = heads < GROUP
    if HAS_NEW:
        gains = load_gains(q_weight_ptr, k_weight_ptr, heads, dims, partners, HEAD_DIM, HAS_NORM)
        wait_for_previous(DEPENDENT)
    if not STARTS_NEXT_LATE:
        let_next_start(DEPENDENT)
    highest, total = see_nothing(HEAD_ROWS)
    if HAS_SINKS and split == 0:
        highest, total = see_sinks(sinks_ptr + kv_head * GROUP, heads, in_group)
    if HAS_NEW:
        is_last = (split == active - 1) & (seq_len > 0)
        q, acc, highest, total = attend_newest(
            q_ptr, new_k_ptr, new_v_ptr, cos_ptr, sin_ptr, slots_ptr, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, token, kv_head, heads, in_group, dims, partners, gains, is_last, highest,
            total, q_stride, new_k_stride, new_v_stride, rotation_stride, scale_log2, eps,
            NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, HAS_NORM, HAS_SCALES, SOFT_CAP, GATHERS,
        )  # fmt: skip
    else:
        at_heads = ((token * NUM_KV_HEADS + kv_head) * GROUP + heads)[:, None] * HEAD_DIM
        in_heads = in_group[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + at_heads + dims[None, :], mask=in_heads, other=0.0)
        acc = tl.zeros([HEAD_ROWS, BLOCK_D], tl.float32)
    dtype = q.dtype
    acc = repeated(acc, ROWS)
    highest = repeated(highest, ROWS)
    total = repeated(total, ROWS)
    if READS_WORDS:
        if PADDED_GROUP > 8:
            # Converted in the tile's layout, many rows take fewer registers.
            q, q_scale = in_float16(repeated(q, ROWS), ROWS)
        else:
            q, q_scale = in_float16(q, HEAD_ROWS)
            q, q_scale = repeated(q, ROWS), repeated(q_scale, ROWS)
        acc, highest, total = attend_keys_of_8_bits(
            q, q_scale, acc, highest, total, start, end, held_tile,
            table_ptr, pointers, kv_head, dims, scale_log2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            HELD_KEYS, KEYS, STAGES, ROWS, BLOCK_D, SOFT_CAP, HAS_ASSEMBLY,
        )  # fmt: skip
    else:
        q = repeated(q, ROWS)
        positions = tl.zeros([ROWS], tl.int32) + seq_len
        if HELD_KEYS > 0:
            held = start + tl.arange(0, HELD_KEYS)
            acc, highest, total = fold_tile(
                q, held_k, held_v, 1.0, 1.0, acc, highest, total, held, end, positions, scale_log2,
                True, 0, False, SOFT_CAP,
            )  # fmt: skip
            start += HELD_KEYS
        if HELD_KEYS == 0 or start < end:
            acc, highest, total = attend_keys(
                q, acc, highest, total, start, end, positions, table_ptr, k_ptr, v_ptr,
                k_scale_ptr, v_scale_ptr, kv_head, dims, scale_log2,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEYS, True, STAGES, 0, HAS_SCALES,
                SOFT_CAP,
            )  # fmt: skip
    if STARTS_NEXT_LATE:
        let_next_start(DEPENDENT)
    # A dummy request has no keys; its output is zero.
    acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    rows = tl.arange(0, ROWS)
    in_rows = rows < GROUP
    in_tile = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    at_scale = kv_head * GROUP * output_scale_stride + token
    if active == 1:
        at_rows = ((token * NUM_KV_HEADS + kv_head) * GROUP + rows)[:, None] * HEAD_DIM
        at_rows += dims[None, :]
        at_scales = at_scale + rows * output_scale_stride
        store_heads(acc, output_ptr, output_scale_ptr, at_rows, at_scales, in_tile, in_rows, dtype)
    else:
        if DEALT > 0:
            # Sequences of second and later parts have at most twice as many parts in all.
            counter = kv_head * (2 * DEALT) + num_before
            first_partial = counter
        else:
            counter = request * NUM_KV_HEADS + kv_head
            first_partial = counter * num_splits
        add_part(
            acc, highest, total, rows, in_rows, in_tile, dims, partials_ptr, lse_ptr, counters_ptr,
            output_ptr, output_scale_ptr, first_partial, counter,
            token * NUM_KV_HEADS + kv_head, at_scale, output_scale_stride, split, active,
            GROUP, PADDED_GROUP, HEAD_DIM, BLOCK_D, AT_ONCE, dtype,
        )  # fmt: skip


def decode_attention(
    q: torch.Tensor,
    cache: KVCacheData,
    metadata: AttentionMetadata,
    output: torch.Tensor,
    new: NewTokens | None = None,
    *,
    output_scale: torch.Tensor | None = None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> None:
    """Attends each single-token request's query to all its keys; skips other requests.

    With a workspace several programs share a sequence's keys; the last one to finish adds the
    partial results up in a fixed order. In steps of single tokens of several requests, parts may
    be as long as the lengths of all sequences say: num_dealt. The grid depends on R, Hq, Hk and the
    workspace only and the host reads nothing, so a launch may be captured.
    T tokens, R requests, Hq/Hk query/kv heads, D head dim.

    q: [T, Hq, D]. Without `new` contiguous, possibly `output` itself; with it not yet transformed,
        each token's heads contiguous, separate from `output`.
    output: [T, Hq, D], contiguous; a request without tokens gets zeros.
    output_scale: with an FP8 output [T, Hq * D] its scales, of rounded_parts; D is 128.
    new: keys and values to transform and store, if every request has one token; None: the cache
        holds them already.
    sliding_window: most keys that a query sees.
    sinks: [Hq], scores without keys.
    scale: factor of the scores.
    soft_cap: of scaled scores; 0 for none.

    Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[2]
    num_requests = metadata.seq_lens.shape[0]
    workspace = metadata.workspace
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    tiles = decode_tiles(
        q.dtype, cache.k.dtype, block_d, num_requests=None if new is None else num_requests,
        num_heads=num_heads, num_kv_heads=num_kv_heads, window=sliding_window or 0,
    )  # fmt: skip
    is_early = num_requests <= EARLY_REQUESTS or not tiles.starts_next_late
    starts_next_late = new is None or not is_early
    splits = num_splits(
        workspace, num_requests, num_heads, num_kv_heads, cache.k.dtype, tiles,
        beside_chunks=metadata.max_seqlen_q > 1,
    )  # fmt: skip
    dealt = num_dealt(
        workspace, None if new is None else num_requests, num_kv_heads, tiles,
        window=sliding_window or 0,
    )  # fmt: skip
    # Without splits the kernel touches none of these three.
    partials, lse, counters = (
        (output, output, metadata.seq_lens)
        if workspace is None
        else (workspace.partials, workspace.lse, workspace.counters)
    )
    # Without new tokens the kernel touches none of these.
    k = v = slots = cos = sin = q_weight = k_weight = metadata.seq_lens
    eps, has_norm = 0.0, False
    if new is not None:
        k, v, slots = new.k, new.v, new.slot_mapping
        cos, sin, eps = new.transform.cos, new.transform.signed_sin, new.transform.eps
        if new.transform.q_weight is not None and new.transform.k_weight is not None:
            q_weight, k_weight, has_norm = new.transform.q_weight, new.transform.k_weight, True
    launch = _launcher(
        num_heads, num_kv_heads, head_dim, cache.k.shape[1], tiles, metadata.max_seqlen_q == 1,
        new is not None, has_norm, sliding_window or 0, sinks is not None,
        cache.k_scale is not None, starts_next_late, new is None or splits > 1 or dealt > 0, dealt,
        soft_cap, q.device,
    )  # fmt: skip
    launch(
        (num_kv_heads, dealt + num_requests, 1 if dealt > 0 else splits),
        q, cache.k, cache.v, *cache_scales(cache), output, output_scale, metadata.block_tables,
        metadata.seq_lens, metadata.query_start_loc, partials, lse, counters,
        k, v, slots, cos, sin, q_weight, k_weight, metadata.seq_lens if sinks is None else sinks,
        metadata.block_tables.stride(0), splits,
        0 if output_scale is None else output_scale.stride(1),
        *(x.stride(0) // head_dim for x in (q, k, v, cos)),
        scale * LOG2_E, eps,
    )  # fmt: skip


@lru_cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    tiles: Tiles,
    only_single_tokens: bool,
    has_new: bool,
    has_norm: bool,
    window: int,
    has_sinks: bool,
    has_scales: bool,
    starts_next_late: bool,
    is_split: bool,
    dealt: int,
    soft_cap: float,
    device: torch.device,
) -> Launch:
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    block_d = max(16, triton.next_power_of_2(head_dim))
    reads_words = has_scales and head_dim % 4 == 0 and block_d >= 64
    # Tensor cores take rows by 16; keys_of_8_bits makes columns of them, which they take by 8.
    rows = max(tiles.rows if reads_words else 16, padded_group)
    # With two rows per warp, a sum over a head stays within its warp.
    head_rows = max(padded_group, min(rows, 2 * tiles.num_warps))
    # Without words the first keys would be held without their scales.
    held_keys = tiles.held_keys if reads_words or not has_scales else 0
    most_elements = _AT_ONCE_PER_WARP * tiles.num_warps
    return Launch(
        _decode_kernel, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, ONLY_SINGLE_TOKENS=only_single_tokens, HAS_NEW=has_new,
        HAS_NORM=has_norm, PADDED_GROUP=padded_group,
        AT_ONCE=max(1, min(_MOST_AT_ONCE, most_elements // (padded_group * block_d))),
        ROWS=rows, KEYS=tiles.keys, BLOCK_D=block_d, STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, maxnreg=tiles.registers, WINDOW=window, HAS_SINKS=has_sinks,
        HAS_SCALES=has_scales,
        STARTS_NEXT_LATE=starts_next_late, IS_SPLIT=is_split, HELD_KEYS=held_keys,
        SOFT_CAP=soft_cap, HAS_ASSEMBLY=device.type == "cuda",
        NUM_PROGRAMS=tiles.num_programs, DEALT=dealt, LEAST_PART=least_part(tiles),
        READS_WORDS=reads_words, HEAD_ROWS=head_rows,
        GATHERS=device.type == "cuda" and head_rows <= _MOST_GATHERED * tiles.num_warps,
        **launch_options(device),
    )  # fmt: skip
