"""Attention of rows to all rows of their segment, without a cache."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.launching.launch import Launch
from models.operands.base_two import LOG2_E

_LEAST_DOT = 16
"""Least sides of a product of tensor cores, in Triton."""


class SegmentTiles(NamedTuple):
    """Rows and keys of a tile, warps of a program, and tiles of keys that it loads ahead."""

    rows: int
    keys: int
    num_warps: int
    stages: int


def segment_tiles(head_dim: int, dtype: torch.dtype) -> SegmentTiles:
    """Returns the tiles for heads of a size."""
    if dtype == torch.float32 or head_dim >= 256:
        return SegmentTiles(32, 32, 4, 1)
    return SegmentTiles(128, 64, 4, 3) if head_dim < 128 else SegmentTiles(128, 64, 8, 2)


@triton.jit
def _load(ptr, at, is_row, dims, HEAD_DIM: tl.constexpr):
    """Returns some dimensions of a head of rows, zeros past its end and for absent rows."""
    in_rows = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + at[:, None] + dims[None, :], mask=in_rows, other=0.0)


@triton.jit
def _fold_keys(
    q, q_rest, acc, acc_rest, highest, total, first, last, end, starts, ends,
    k_ptr, v_ptr, k_stride, v_stride, scale_log2,
    IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Folds the keys in [first, last) into a running softmax, in whole tiles.

    IS_MASKED: a row sees the keys from its start to its end; otherwise all.
    """
    dims = tl.arange(0, DIMS)
    rest = DIMS + tl.arange(0, REST if REST > 0 else DIMS)
    for tile in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = tile + tl.arange(0, KEYS)
        is_key = keys < end
        at_k = keys.to(tl.int64) * k_stride
        at_v = keys.to(tl.int64) * v_stride
        k = _load(k_ptr, at_k, is_key, dims, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _load(k_ptr, at_k, is_key, rest, HEAD_DIM)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if IS_MASKED:
            is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        v = _load(v_ptr, at_v, is_key, dims, HEAD_DIM)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * kept[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = _load(v_ptr, at_v, is_key, rest, HEAD_DIM)
            acc_rest = tl.dot(weights, v_rest, acc_rest * kept[:, None], input_precision="ieee")
        highest = new_highest
    return acc, acc_rest, highest, total


@triton.jit(do_not_specialize=["num_rows"])
def _segment_attention_kernel(
    q_ptr, k_ptr, v_ptr, bounds_ptr, output_ptr,
    num_rows, q_stride, k_stride, v_stride, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attends a tile of rows, of one head.

    Tiles of keys that all rows of the tile see need no mask. A tile that segments share reads the
    keys of all of them. Heads are computed in two parts, of DIMS dimensions and of the REST, as
    sizes must be powers of two.
    """
    head = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    own = tl.minimum(rows, num_rows - 1)
    starts = tl.load(bounds_ptr + 2 * own)
    ends = tl.load(bounds_ptr + 2 * own + 1)
    first = tl.min(starts, 0)
    end = tl.max(ends, 0)
    # From here to there all rows see all keys.
    last_start = tl.max(starts, 0)
    first_end = tl.min(ends, 0)
    all_see = first + (last_start - first + KEYS - 1) // KEYS * KEYS
    until = all_see + tl.maximum(first_end - all_see, 0) // KEYS * KEYS

    dims = tl.arange(0, DIMS)
    rest = DIMS + tl.arange(0, REST if REST > 0 else DIMS)
    q_ptr += head * HEAD_DIM
    k_ptr += head * HEAD_DIM
    v_ptr += head * HEAD_DIM
    at_q = rows.to(tl.int64) * q_stride
    q = _load(q_ptr, at_q, is_row, dims, HEAD_DIM)
    q_rest = q
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    acc_rest = acc
    if REST > 0:
        q_rest = _load(q_ptr, at_q, is_row, rest, HEAD_DIM)
        acc_rest = tl.zeros([ROWS, REST], tl.float32)
    # Finite, as a row may see no key of its first tile, and inf - inf is NaN.
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, acc_rest, highest, total = _fold_keys(
        q, q_rest, acc, acc_rest, highest, total, first, all_see, end, starts, ends,
        k_ptr, v_ptr, k_stride, v_stride, scale_log2,
        True, HEAD_DIM, DIMS, REST, KEYS, STAGES,
    )  # fmt: skip
    acc, acc_rest, highest, total = _fold_keys(
        q, q_rest, acc, acc_rest, highest, total, all_see, until, end, starts, ends,
        k_ptr, v_ptr, k_stride, v_stride, scale_log2,
        False, HEAD_DIM, DIMS, REST, KEYS, STAGES,
    )  # fmt: skip
    acc, acc_rest, highest, total = _fold_keys(
        q, q_rest, acc, acc_rest, highest, total, until, end, end, starts, ends,
        k_ptr, v_ptr, k_stride, v_stride, scale_log2,
        True, HEAD_DIM, DIMS, REST, KEYS, STAGES,
    )  # fmt: skip
    at_output = output_ptr + (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM
    values = (acc / total[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(at_output + dims[None, :], values, mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])
    if REST > 0:
        values = (acc_rest / total[:, None]).to(output_ptr.dtype.element_ty)
        in_rows = is_row[:, None] & (rest < HEAD_DIM)[None, :]
        tl.store(at_output + rest[None, :], values, mask=in_rows)


def segment_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
    tiles: SegmentTiles | None = None,
) -> torch.Tensor:
    """Runs octavo::segment_attention; tiles: by default those of `segment_tiles`."""
    num_rows, num_heads, head_dim = q.shape
    q, k, v = (_with_whole_rows(each) for each in (q, k, v))
    output = torch.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    tiles = tiles or segment_tiles(head_dim, q.dtype)
    launch = _launcher(num_heads, head_dim, tiles, q.dtype, q.device)
    launch(
        (triton.cdiv(num_rows, tiles.rows), num_heads, 1),
        q, k, v, bounds, output, num_rows, q.stride(0), k.stride(0), v.stride(0), scale * LOG2_E,
    )  # fmt: skip
    return output


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x, [N, H, D], with the heads of each row side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@lru_cache
def _launcher(
    num_heads: int, head_dim: int, tiles: SegmentTiles, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Returns the kernel for heads of this form."""
    del dtype, device  # each has its own builds
    dims = max(_LEAST_DOT, 1 << (head_dim.bit_length() - 1))
    rest = max(_LEAST_DOT, triton.next_power_of_2(head_dim - dims)) if head_dim > dims else 0
    return Launch(
        _segment_attention_kernel,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIMS=dims, REST=rest, ROWS=tiles.rows,
        KEYS=tiles.keys, STAGES=tiles.stages, num_warps=tiles.num_warps,
    )  # fmt: skip
