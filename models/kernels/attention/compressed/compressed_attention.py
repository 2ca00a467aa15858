"""Attention to recent keys of tokens and to compressed entries; all heads read the same keys.

Keys are values, too. A query sees few keys wherever it is, so a prompt's tokens run as single ones.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.kernels.attention.compressed.entries import make_entries, store_rows
from models.kernels.attention.compressed.entry_choice import choose_entries
from models.kernels.attention.compressed.row_places import (
    is_aligned,
    row_form,
    row_places,
    row_tensors,
)
from models.kernels.attention.configurations import MANY_LATENT_TOKENS
from models.kernels.attention.latent.latent_attention import MOST_TOKENS, combine_kernel
from models.kernels.attention.request_search import request_of
from models.kernels.gpu import gpu_of
from models.kernels.tuning.tiles import MAX_SPLITS
from models.operands.base_two import LOG2_E
from models.operands.entry_maker import Entries
from models.operands.row_pages import RowPages

_METADATA = [
    "query_start_ptr", "positions_ptr", "chosen_ptr", "token_stride", "entry_stride",
    "num_requests", "window", "num_splits", "num_chosen",
]  # fmt: skip
_PROGRAMS = 264
"""Programs that a few tokens' keys are split among: two for each multiprocessor of an H200."""
_FEWEST_WHOLE = 128
"""Tokens from which on keys are not split, whatever the heads: dummy steps have as many."""
_ALL = 2**30
"""Entries that are seen without a choice; one build of the kernel serves both."""
_STAGES = {True: 3, False: 2}
"""Pipeline stages with 16 heads per program and with more."""
_LOG2_E = tl.constexpr(LOG2_E)


class AttentionForm(NamedTuple):
    """All that a build is made for.

    num_heads: query heads. size: elements of a key; block_d: a power of two that holds one.
    has_entries: whether there are compressed entries.
    heads, keys: of a tile; stages: of the pipeline.
    is_split: another kernel adds up the parts of every token.
    """

    num_heads: int
    size: int
    block_d: int
    has_entries: bool
    heads: int
    keys: int
    stages: int
    is_split: bool


@triton.jit
def _see_rows(q, rows_ptr, at, are_seen, acc, highest, total, scale_log2, form: tl.constexpr):
    """Adds rows by place, [keys], to a running softmax: keys, and values as well."""
    columns = tl.arange(0, form.block_d)
    rows = tl.load(
        rows_ptr + at[:, None] + columns[None, :],
        mask=are_seen[:, None] & (columns < form.size)[None, :],
        other=0.0,
    )
    scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * scale_log2
    scores = tl.where(are_seen[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    kept = tl.exp2(highest - new_highest)
    total = total * kept + tl.sum(weights, 1)
    acc = acc * kept[:, None]
    acc = tl.dot(weights.to(rows.dtype), rows, acc, input_precision="ieee")
    return acc, new_highest, total


@triton.jit
def _part(
    position_ptr, window, num_chosen, split, num_splits, entry_form: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Returns the recent keys of a token, how many entries there are and are read, and tiles.

    Tiles are those of recent keys, and the first and the end of the part's among all.
    """
    end = tl.load(position_ptr).to(tl.int32) + 1
    begin = tl.maximum(end - window, 0)
    recent_tiles = tl.cdiv(end - begin, form.keys)
    num_seen = 0
    num_entries = 0
    if form.has_entries:
        num_seen = end // entry_form.rate
        num_entries = tl.minimum(num_seen, num_chosen)
    num_tiles = recent_tiles + tl.cdiv(num_entries, form.keys)
    each = tl.cdiv(num_tiles, num_splits)
    first = tl.minimum(split * each, num_tiles)
    last = tl.minimum(first + each, num_tiles)
    return begin, end, num_seen, num_entries, recent_tiles, first, last


@triton.jit(do_not_specialize=_METADATA)
def _compressed_kernel(
    q_ptr, sinks_ptr, tokens, entries, chosen_ptr, output_ptr, partials_ptr, lse_ptr,
    query_start_ptr, positions_ptr, token_stride, entry_stride, num_requests, window, num_splits,
    num_chosen, scale_log2,
    token_form: tl.constexpr, entry_form: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Attends some heads of one token to one part of its keys: whole tiles, recent ones first."""
    split = tl.program_id(1)
    token = tl.program_id(2)
    request = request_of(token, query_start_ptr, num_requests)
    begin, end, num_seen, num_entries, recent_tiles, first, last = _part(
        positions_ptr + token, window, num_chosen, split, num_splits, entry_form, form
    )

    heads = tl.program_id(0) * form.heads + tl.arange(0, form.heads)
    is_head = heads < form.num_heads
    columns = tl.arange(0, form.block_d)
    is_column = (columns < form.size)[None, :]
    row = token.to(tl.int64) * form.num_heads + heads
    in_tile = is_head[:, None] & is_column
    q = tl.load(q_ptr + row[:, None] * form.size + columns[None, :], mask=in_tile, other=0.0)
    # The first part begins with the sinks, scores without a key. Highest scores are finite, as
    # inf - inf is NaN.
    sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E
    highest = tl.where(split == 0, sinks, -1e30)
    total = tl.where(split == 0, tl.full([form.heads], 1.0, tl.float32), 0.0)
    acc = tl.full([form.heads, form.block_d], 0.0, tl.float32)

    table_ptr = tokens.tables + request.to(tl.int64) * token_stride
    for tile in tl.range(
        tl.minimum(first, recent_tiles), tl.minimum(last, recent_tiles), num_stages=form.stages
    ):
        numbers = begin + tile * form.keys + tl.arange(0, form.keys)
        are_seen = numbers < end
        at, _ = row_places(table_ptr, numbers, are_seen, token_form)
        acc, highest, total = _see_rows(
            q, tokens.rows, at, are_seen, acc, highest, total, scale_log2, form
        )
    if form.has_entries:
        entry_table_ptr = entries.tables + request.to(tl.int64) * entry_stride
        for tile in tl.range(
            tl.maximum(first, recent_tiles) - recent_tiles,
            tl.maximum(last, recent_tiles) - recent_tiles,
            num_stages=form.stages,
        ):
            numbers = tile * form.keys + tl.arange(0, form.keys)
            are_seen = numbers < num_entries
            # Where all entries that there are can be chosen, all are.
            is_choice = num_seen > num_chosen
            chosen_ptrs = chosen_ptr + token.to(tl.int64) * num_chosen + numbers
            chosen = tl.load(chosen_ptrs, mask=are_seen & is_choice, other=0)
            numbers = tl.where(is_choice, chosen.to(tl.int32), numbers)
            at, _ = row_places(entry_table_ptr, numbers, are_seen, entry_form)
            acc, highest, total = _see_rows(
                q, entries.rows, at, are_seen, acc, highest, total, scale_log2, form
            )

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if form.is_split:
        row = (token.to(tl.int64) * num_splits + split) * form.num_heads + heads
        # A part without keys counts nothing.
        lse = tl.where(total > 0.0, highest + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=is_head)
        tl.store(partials_ptr + row[:, None] * form.size + columns[None, :], acc, mask=in_tile)
    else:
        at_output = output_ptr + row[:, None] * form.size + columns[None, :]
        tl.store(at_output, acc.to(output_ptr.dtype.element_ty), mask=in_tile)


def takes(q: torch.Tensor, tokens: RowPages, entries: Entries | None, num_tokens: int) -> bool:
    """Returns whether kernels run a step of num_tokens with queries [T, H, D]."""
    rows = [tokens.rows] if entries is None else [tokens.rows, entries.pages.rows]
    return num_tokens <= MOST_TOKENS and q.shape[-1] % 8 == 0 and all(map(is_aligned, rows))


def attend(
    q: torch.Tensor,
    recent: torch.Tensor,
    output: torch.Tensor,
    tokens: RowPages,
    entries: Entries | None,
    sinks: torch.Tensor,
    window: int,
    scale: float,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Runs models.ops.attention.compressed_attention on a GPU; the host reads nothing.

    Grids depend on sizes alone, so launches may be captured. Results of parts are added up in a
    fixed order.

    q, output: [T, H, D]. recent: [T, C], rows of the step's tokens. sinks: [H].
    query_start_loc: [R + 1], where each request's query tokens start. positions: those of the
        tokens, at most T.
    """
    num_tokens, num_heads, size = len(positions), q.shape[1], q.shape[2]
    if not num_tokens:
        return
    store_rows(recent, tokens, query_start_loc, positions)
    chosen = None
    if entries is not None:
        place = 0
        for maker in entries.makers:
            make_entries(maker, tokens, entries.pages, place, query_start_loc, positions)
            place += maker.size
        if entries.index is not None:
            chosen = choose_entries(entries.index, entries.pages, size, query_start_loc, positions)
    block_d = max(16, triton.next_power_of_2(size))
    is_few = num_tokens < MANY_LATENT_TOKENS
    heads, keys = _tile(num_heads, block_d, q.itemsize, q.device, is_few=is_few)
    head_blocks = triton.cdiv(num_heads, heads)
    splits = 1
    if num_tokens < _FEWEST_WHOLE:
        splits = max(1, min(MAX_SPLITS, _PROGRAMS // (num_tokens * head_blocks)))
    num_rows = num_tokens * splits if splits > 1 else 0
    partials = torch.empty(num_rows, num_heads, size, dtype=torch.float32, device=q.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=q.device)
    pages = tokens if entries is None else entries.pages
    form = AttentionForm(
        num_heads=num_heads, size=size, block_d=block_d, has_entries=entries is not None,
        heads=heads, keys=keys,
        stages=1 if q.itemsize > 2 else _STAGES[heads == 16], is_split=splits > 1,
    )  # fmt: skip
    _compressed_kernel[(head_blocks, splits, num_tokens)](
        q, sinks, row_tensors(tokens), row_tensors(pages),
        positions if chosen is None else chosen, output, partials, lse, query_start_loc, positions,
        tokens.block_tables.stride(0), pages.block_tables.stride(0), len(query_start_loc) - 1,
        window, splits, _ALL if chosen is None else chosen.shape[1], scale * LOG2_E,
        token_form=row_form(tokens), entry_form=row_form(pages), form=form,
        num_warps=4 if heads == 16 else 8,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(num_heads, num_tokens)](
            partials, lse, output, splits, NUM_HEADS=num_heads, LATENT=size, BLOCK_C=block_d,
            MAX_SPLITS=MAX_SPLITS, num_warps=8,
        )  # fmt: skip


@lru_cache
def _tile(
    num_heads: int, block_d: int, itemsize: int, device: torch.device, *, is_few: bool
) -> tuple[int, int]:
    """Returns heads and keys of a program: all heads where tokens are many, for fewer reads."""
    if itemsize > 2:
        return 16, 16
    if is_few:
        return 16, 32
    heads, gpu = min(64, max(16, triton.next_power_of_2(num_heads))), gpu_of(device)
    while heads > 16 and not gpu.fits((heads + _STAGES[False] * 32) * block_d * itemsize):
        heads //= 2
    return heads, 32
