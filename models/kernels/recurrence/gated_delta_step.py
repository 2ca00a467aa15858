"""The gated delta rule, a token at a time: S <- e^g S; S <- S + k (beta (v - k^T S)); o = q^T S.

Source: arXiv 2412.06464; with a decay of each channel of k, arXiv 2510.26692.
"""

from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant
from models.forward_context import AttentionMetadata
from models.kernels.launching.dependent_launch import (
    launch_options,
    let_next_start,
    wait_for_previous,
)
from models.kernels.launching.launch import Launch
from models.kernels.recurrence.gates import log_decay, normalised, sigmoid
from models.kernels.recurrence.state_rows import (
    StateForm,
    first_kept,
    first_position,
    recurrent_form,
    request_span,
    row_offset,
    slot_ptr,
)
from models.kernels.tuning.registry import tables_on
from models.kernels.tuning.table import row_of
from models.kernels.tuning.tiles import StateTiles
from models.state_cache import StateCacheData

_VARYING = [
    "block_tables_ptr", "seq_lens_ptr", "query_start_ptr", "table_stride", "num_blocks",
    "most_tokens",
]  # fmt: skip  # specialising on these would compile again while serving


class DeltaHeads(NamedTuple):
    """Sizes of the gated delta rule.

    num_k_heads, num_heads: of queries and keys, and of values. k_dim, v_dim: of their heads.
    block_k: the power of two that holds k_dim. decays_channels: each channel of k has a decay.
    beta_scale: factor of sigmoid(b). decay_floor: see gates.log_decay.
    """

    num_k_heads: int
    num_heads: int
    k_dim: int
    v_dim: int
    block_k: int
    decays_channels: bool
    beta_scale: float = 1.0
    decay_floor: float = 0.0


@triton.jit
def load_decays(ptr, head, dim, is_dim, heads: tl.constexpr):
    """Returns the value of a head, or those of its channels, like dim."""
    if heads.decays_channels:
        values = tl.load(ptr + head * heads.k_dim + dim, mask=is_dim, other=0.0)
    else:
        values = tl.load(ptr + head)
    return values.to(tl.float32)


@triton.jit
def _state_ptrs(
    memory_ptr, table_ptr, head, dim, column, num_blocks, form: tl.constexpr, heads: tl.constexpr
):  # fmt: skip
    """Returns where elements of a head's state are, [K, V]; table_ptr: the pages of its slot."""
    row = head * heads.k_dim + dim
    at_rows = row_offset(row, table_ptr, dim < heads.k_dim, num_blocks, form)
    return memory_ptr + at_rows[:, None] + column[None, :]


@triton.jit
def _keep_state(
    state, step, num_tokens, position, memory_ptr, table_ptr, table_stride, head, dim, column,
    mask, num_blocks, form: tl.constexpr, heads: tl.constexpr,
):  # fmt: skip
    """Stores the state after a token of a request in its slot; position: of the first token."""
    if step >= first_kept(num_tokens, form):
        slot = slot_ptr(table_ptr, position + step + 1, table_stride, form)
        ptrs = _state_ptrs(memory_ptr, slot, head, dim, column, num_blocks, form, heads)
        tl.store(ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _gated_delta_step_kernel(
    qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, output_ptr, memory_ptr, block_tables_ptr,
    seq_lens_ptr, query_start_ptr, qkv_stride, a_stride, b_stride, table_stride, num_blocks,
    most_tokens, scale, form: tl.constexpr, heads: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Does all tokens of a request, if these are at most most_tokens, for COLUMNS of a head."""
    let_next_start(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    request = tl.program_id(2)
    dim = tl.arange(0, heads.block_k)
    is_dim = dim < heads.k_dim
    is_column = column < heads.v_dim
    mask = is_dim[:, None] & is_column[None, :]
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    dt_bias = load_decays(dt_bias_ptr, head, dim, is_dim, heads)
    # Tables and states are of before this pass, so they need no wait.
    table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
    start, end, has_state, keeps = request_span(request, query_start_ptr, seq_lens_ptr, table_ptr)
    has_tokens = (start < end) & (end - start <= most_tokens)
    position = first_position(request, seq_lens_ptr, start, end)
    slot = slot_ptr(table_ptr, position, table_stride, form)
    state_ptrs = _state_ptrs(memory_ptr, slot, head, dim, column, num_blocks, form, heads)
    is_read = mask & has_state & has_tokens
    state = tl.load(state_ptrs, mask=is_read, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    if has_tokens:
        k_head = head // (heads.num_heads // heads.num_k_heads)
        for step in range(end - start):
            token = start.to(tl.int64) + step
            q_ptrs = qkv_ptr + token * qkv_stride + k_head * heads.k_dim + dim
            q = tl.load(q_ptrs, mask=is_dim, other=0.0).to(tl.float32)
            k_ptrs = q_ptrs + heads.num_k_heads * heads.k_dim
            k = tl.load(k_ptrs, mask=is_dim, other=0.0).to(tl.float32)
            v_ptrs = qkv_ptr + token * qkv_stride + head * heads.v_dim + column
            v_ptrs += 2 * heads.num_k_heads * heads.k_dim
            v = tl.load(v_ptrs, mask=is_column, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + token * b_stride + head).to(tl.float32)
            beta = heads.beta_scale * sigmoid(b)
            a = load_decays(a_ptr + token * a_stride, head, dim, is_dim, heads)
            q = normalised(q, 0) * scale
            k = normalised(k, 0)
            decay = tl.exp(log_decay(rate, a + dt_bias, heads.decay_floor))
            state *= decay[:, None] if heads.decays_channels else decay
            written = (v - tl.sum(state * k[:, None], 0)) * beta
            # Of the state before the write, so that both sums are under way together.
            read = tl.sum(state * q[:, None], 0)
            output = read + tl.sum(q * k, 0) * written
            state += k[:, None] * written[None, :]
            if form.rounds:
                state = state.to(memory_ptr.dtype.element_ty).to(tl.float32)
            out_ptrs = output_ptr + (token * heads.num_heads + head) * heads.v_dim + column
            tl.store(out_ptrs, output.to(output_ptr.dtype.element_ty), mask=is_column)
            if form.slots > 1:
                _keep_state(
                    state, step, end - start, position, memory_ptr, table_ptr, table_stride, head,
                    dim, column, mask & keeps, num_blocks, form, heads,
                )  # fmt: skip
        if form.slots == 1:
            tl.store(state_ptrs, state.to(memory_ptr.dtype.element_ty), mask=mask & keeps)


def delta_heads(
    a: torch.Tensor,
    output: torch.Tensor,
    num_k_heads: int,
    head_k_dim: int,
    *,
    beta_scale: float = 1.0,
    decay_floor: float = 0.0,
) -> DeltaHeads:
    """Returns the sizes of a rule with gates `a`, [T, H] or [T, H, Dk], and `output` [T, H, Dv]."""
    return DeltaHeads(
        num_k_heads=num_k_heads,
        num_heads=output.shape[1],
        k_dim=head_k_dim,
        v_dim=output.shape[2],
        block_k=triton.next_power_of_2(head_k_dim),
        decays_channels=a.dim() == 3,
        beta_scale=beta_scale,
        decay_floor=decay_floor,
    )


def gated_delta_step(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    output: torch.Tensor,
    cache: StateCacheData,
    metadata: AttentionMetadata,
    heads: DeltaHeads,
    *,
    most_tokens: int,
) -> None:
    """Runs gated_delta_rule for requests of at most most_tokens query tokens."""
    tables = metadata.block_tables
    num_requests = len(metadata.seq_lens)
    columns, launch = _launcher(
        recurrent_form(cache, rounds=is_batch_invariant()),
        heads,
        inf if is_batch_invariant() else num_requests,
        qkv.device,
    )
    launch(
        (-(-heads.v_dim // columns), heads.num_heads, num_requests),
        qkv, a, b, a_log, dt_bias, output, cache.memory.view(cache.spec.dtype), tables,
        metadata.seq_lens, metadata.query_start_loc, qkv.stride(0), a.stride(0), b.stride(0),
        tables.stride(0), cache.num_blocks, most_tokens, heads.k_dim**-0.5,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _launcher(
    form: StateForm, heads: DeltaHeads, num_requests: float, device: torch.device
) -> tuple[int, Launch]:
    """Returns the columns of a program, and the kernel."""
    tiles = row_of(tables_on(device).delta_steps, num_requests)
    return tiles.columns, _kernel(form, heads, tiles, device)


@lru_cache
def _kernel(form: StateForm, heads: DeltaHeads, tiles: StateTiles, device: torch.device) -> Launch:
    return Launch(
        _gated_delta_step_kernel, form=form, heads=heads, COLUMNS=tiles.columns,
        num_warps=tiles.num_warps, num_stages=1, **launch_options(device),
    )  # fmt: skip
