"""Masks logits by packed bits: one program for each block of a masked row."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit(do_not_specialize=["rows_ptr", "bits_ptr"])
def _mask_kernel(
    logits_ptr, rows_ptr, bits_ptr, SIZE: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < SIZE
    words = tl.load(bits_ptr + row * NUM_WORDS + tokens // 32, mask=is_token, other=0)
    is_forbidden = ((words >> (tokens % 32)) & 1) == 0
    at = logits_ptr + tl.load(rows_ptr + row).to(tl.int64) * SIZE + tokens
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=is_token & is_forbidden)


def mask_tokens(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Changes logits in place; see models.ops.sampling.mask_tokens."""
    size = logits.shape[1]
    grid = (triton.cdiv(size, _BLOCK), len(rows))
    _mask_kernel[grid](
        logits, rows, bits, SIZE=size, NUM_WORDS=bits.shape[1], BLOCK=_BLOCK, num_warps=4
    )
