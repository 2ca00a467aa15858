"""Attention of rows to all rows of their segment, without a cache."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from models.kernels.launching.launch import Launch
from models.operands.base_two import LOG2_E

_LEAST_DOT = 16
"""Least sides of a product of tensor cores, in Triton."""


class SegmentTiles(NamedTuple):
    """Rows and keys of a tile, warps of a program, and tiles of keys that it loads ahead.

    is_copied: whether Hopper's copy engine loads keys and values.
    """

    rows: int
    keys: int
    num_warps: int
    stages: int
    is_copied: bool = False


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
def _load_tile(
    part, first, end, stride, column, OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, KEYS: tl.constexpr, IS_COPIED: tl.constexpr,
):  # fmt: skip
    """Returns DIMS dimensions of KEYS rows' head from OFFSET on; past its end any values.

    part: a pointer, or a descriptor of tiles. column: where the head begins in a row.
    """
    if IS_COPIED:
        tile = part.load([first, column + OFFSET])
    else:
        keys = first + tl.arange(0, KEYS)
        at = keys.to(tl.int64) * stride + column
        tile = _load(part, at, keys < end, OFFSET + tl.arange(0, DIMS), HEAD_DIM)
    return tile


@triton.jit
def _fold_keys(
    q, q_rest, acc, acc_rest, highest, total, first, last, end, starts, ends, column,
    parts, k_stride, v_stride, scale_log2,
    IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, IS_COPIED: tl.constexpr,
):  # fmt: skip
    """Folds the keys in [first, last) into a running softmax, in whole tiles.

    IS_MASKED: a row sees the keys from its start to its end; otherwise all.
    """
    k_part, k_rest_part, v_part, v_rest_part = parts
    for tile in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = tile + tl.arange(0, KEYS)
        k = _load_tile(k_part, tile, end, k_stride, column, 0, HEAD_DIM, DIMS, KEYS, IS_COPIED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = _load_tile(
                k_rest_part, tile, end, k_stride, column, DIMS, HEAD_DIM, REST, KEYS, IS_COPIED
            )
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if IS_MASKED:
            is_seen = (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        v = _load_tile(v_part, tile, end, v_stride, column, 0, HEAD_DIM, DIMS, KEYS, IS_COPIED)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * kept[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = _load_tile(
                v_rest_part, tile, end, v_stride, column, DIMS, HEAD_DIM, REST, KEYS, IS_COPIED
            )
            acc_rest = tl.dot(weights, v_rest, acc_rest * kept[:, None], input_precision="ieee")
        highest = new_highest
    return acc, acc_rest, highest, total


@triton.jit(do_not_specialize=["num_rows"])
def _segment_attention_kernel(
    q_ptr, k_part, k_rest_part, v_part, v_rest_part, bounds_ptr, output_ptr,
    num_rows, q_stride, k_stride, v_stride, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, IS_COPIED: tl.constexpr,
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
    column = head * HEAD_DIM
    parts = (k_part, k_rest_part, v_part, v_rest_part)
    q_ptr += column
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
        q, q_rest, acc, acc_rest, highest, total, first, all_see, end, starts, ends, column,
        parts, k_stride, v_stride, scale_log2,
        True, HEAD_DIM, DIMS, REST, KEYS, STAGES, IS_COPIED,
    )  # fmt: skip
    acc, acc_rest, highest, total = _fold_keys(
        q, q_rest, acc, acc_rest, highest, total, all_see, until, end, starts, ends, column,
        parts, k_stride, v_stride, scale_log2,
        False, HEAD_DIM, DIMS, REST, KEYS, STAGES, IS_COPIED,
    )  # fmt: skip
    acc, acc_rest, highest, total = _fold_keys(
        q, q_rest, acc, acc_rest, highest, total, until, end, end, starts, ends, column,
        parts, k_stride, v_stride, scale_log2,
        True, HEAD_DIM, DIMS, REST, KEYS, STAGES, IS_COPIED,
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
        q, *_parts(k, tiles), *_parts(v, tiles), bounds, output, num_rows,
        q.stride(0), k.stride(0), v.stride(0), scale * LOG2_E,
    )  # fmt: skip
    return output


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x, [N, H, D], with the heads of each row side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _split(head_dim: int) -> tuple[int, int]:
    """Returns the dimensions of both parts of a head, powers of two; 0 without a second one."""
    dims = max(_LEAST_DOT, 1 << (head_dim.bit_length() - 1))
    rest = max(_LEAST_DOT, triton.next_power_of_2(head_dim - dims)) if head_dim > dims else 0
    return dims, rest


def _parts(
    x: torch.Tensor, tiles: SegmentTiles
) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor | TensorDescriptor | None]:
    """Returns where both parts of heads are loaded from; x: [N, H, D], or descriptors of it.

    Tiles of the second part may reach into the next head. Queries have zeros there, and what values
    give is not stored.
    """
    num_rows, num_heads, head_dim = x.shape
    dims, rest = _split(head_dim)
    if not tiles.is_copied:
        return x, x if rest else None
    shape, strides = [num_rows, num_heads * head_dim], [x.stride(0), 1]
    described = [
        TensorDescriptor(x, shape, strides, [tiles.keys, size]) if size else None
        for size in (dims, rest)
    ]
    assert described[0] is not None, "heads have a first part"
    return described[0], described[1]


@lru_cache
def _launcher(
    num_heads: int, head_dim: int, tiles: SegmentTiles, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Returns the kernel for heads of this form."""
    del dtype, device  # each has its own builds
    dims, rest = _split(head_dim)
    return Launch(
        _segment_attention_kernel,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIMS=dims, REST=rest, ROWS=tiles.rows,
        KEYS=tiles.keys, STAGES=tiles.stages, IS_COPIED=tiles.is_copied,
        num_warps=tiles.num_warps,
    )  # fmt: skip
