"""The largest logit of each group of tokens; later kernels skip groups by it."""

import torch
import triton
import triton.language as tl

GROUP = 256
"""Tokens of one group."""

CHUNK = 4096
"""Tokens that one program reads; a power of two of groups."""


@triton.jit
def _group_maxima_kernel(
    logits_ptr, maxima_ptr, sums_ptr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PER_CHUNK: tl.constexpr, GROUP: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = chunk * PER_CHUNK + tl.arange(0, PER_CHUNK)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(logits_ptr + row * SIZE + tokens, mask=tokens < SIZE, other=float("-inf"))
    logits = logits.to(tl.float32)
    maxima = tl.max(logits, 1)
    tl.store(maxima_ptr + row * GROUPS + groups, maxima)
    if HAS_SUMS:
        # A group without a finite logit adds nothing; -inf - -inf would be NaN.
        base = tl.where(maxima == float("-inf"), 0.0, maxima)
        tl.store(sums_ptr + row * GROUPS + groups, tl.sum(tl.exp(logits - base[:, None]), 1))


def group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Returns [S, G] float32 of logits [S, V], contiguous; -inf in groups after the last token."""
    maxima, _ = _launch(logits, has_sums=False)
    return maxima


def group_maxima_and_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the maxima and each group's sum of exp(logit - maximum), both [S, G] float32."""
    return _launch(logits, has_sums=True)


def _launch(logits: torch.Tensor, *, has_sums: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one program per chunk and row; without sums returns the maxima twice."""
    num_rows, size = logits.shape
    per_chunk = min(CHUNK // GROUP, triton.next_power_of_2(triton.cdiv(size, GROUP)))
    num_chunks = triton.cdiv(size, per_chunk * GROUP)
    maxima = torch.empty(
        num_rows, num_chunks * per_chunk, dtype=torch.float32, device=logits.device
    )
    sums = torch.empty_like(maxima) if has_sums else maxima
    _group_maxima_kernel[(num_chunks, num_rows)](
        logits, maxima, sums,
        SIZE=size, GROUPS=maxima.shape[1], PER_CHUNK=per_chunk, GROUP=GROUP, HAS_SUMS=has_sums,
        num_warps=4,
    )  # fmt: skip
    return maxima, sums
