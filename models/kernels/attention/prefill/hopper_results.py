"""Stores what a warpgroup of hopper_attention has computed: whole results, or those of a part."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from models.kernels.attention.prefill.hopper_copies import is_packed, rows_of_token
from models.kernels.attention.prefill.tile_parts import ROWS_OF_PART
from models.number_formats import FP8_MAX, SMALLEST_AMAX

_FP8_MAX = gl.constexpr(FP8_MAX)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)

ROWS = gl.constexpr(64)
"""Rows of a warpgroup's products (PTX ISA, wgmma)."""


@gluon.jit
def write_part(
    half: gl.constexpr, results, parts, place, num_parts, part, num_tokens, form: gl.constexpr
):
    """Stores a warpgroup's results for one part of the keys, as tile_parts reads them."""
    acc, lse = results
    HEAD_DIM: gl.constexpr = acc.shape[1]
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, acc.type.layout))
    HEADS: gl.constexpr = rows_of_token(form.group)
    token = rows // HEADS
    head = rows % HEADS
    in_rows = (token < num_tokens) & (head < form.group)
    if is_packed(form.group):
        # The last rows are of a token of the next tile.
        in_rows &= rows < 2 * ROWS // form.group * form.group
    at = place * ROWS_OF_PART + (token * num_parts + part) * form.group + head
    gl.store(
        parts.partials + at[:, None] * HEAD_DIM + dims[None, :], acc,
        mask=in_rows[:, None] & (dims < HEAD_DIM)[None, :],
    )  # fmt: skip
    gl.store(parts.lse + at, gl.convert_layout(lse, rows.type.layout), mask=in_rows)


@gluon.jit
def write_rows(
    half: gl.constexpr, tile, outputs, query_start, first_query, num_queries, kv_head,
    form: gl.constexpr,
):  # fmt: skip
    """Stores the results of a warpgroup's rows, rounded to FP8 if there are scales to store."""
    output_ptr, scale_ptr, scale_stride = outputs
    HEAD_DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0]
    )
    rows = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    HEADS: gl.constexpr = rows_of_token(form.group)
    queries = first_query + rows // HEADS
    head = rows % HEADS
    token = (query_start + queries).to(gl.int64)
    at_heads = ((token * form.num_kv_heads + kv_head) * form.group + head)[
        :, None
    ] * HEAD_DIM + dims[None, :]
    in_rows = (queries < num_queries) & (head < form.group)
    if is_packed(form.group):
        in_rows &= rows < 2 * ROWS // form.group * form.group
    values = tile.load(layout)
    if scale_ptr is not None:
        # As in store_heads.
        exact = values.to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(exact), 1), _SMALLEST_AMAX) / _FP8_MAX
        scaled = gl.minimum(gl.maximum(exact / scale[:, None], -_FP8_MAX), _FP8_MAX)
        values = scaled.to(output_ptr.dtype.element_ty)
        at_scales = (kv_head * form.group + head) * scale_stride + token
        gl.store(scale_ptr + at_scales, scale, mask=in_rows)
    gl.store(output_ptr + at_heads, values, mask=in_rows[:, None])
