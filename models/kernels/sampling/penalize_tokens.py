"""Penalties in two kernels whose work grows with the history, not with the vocabulary.

The first counts the history's tokens. The second exchanges each token's count for 0, so that only
the first occurrence of a token changes its logit.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_IN_PROMPT = tl.constexpr(1 << 30)
"""Set in the count of a prompt token; the other bits count the output."""

_NOT_SPECIALIZED = [
    "tokens_ptr", "indices_ptr", "row_ids_ptr", "seq_lens_ptr", "num_prompt_ptr", "stride",
    "repetition_ptr", "frequency_ptr", "presence_ptr",
]  # fmt: skip


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _count_kernel(
    counts_ptr, tokens_ptr, row_ids_ptr, seq_lens_ptr, num_prompt_ptr, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens_ptr + sequence)
    num_prompt = tl.load(num_prompt_ptr + sequence)
    row = tl.load(row_ids_ptr + sequence).to(tl.int64)
    is_known = positions < seq_len
    tokens = tl.load(tokens_ptr + row * stride + positions, mask=is_known, other=0)
    at = counts_ptr + sequence * SIZE + tokens
    is_output = positions >= num_prompt
    tl.atomic_or(at, tl.full((BLOCK,), _IN_PROMPT, tl.int32), mask=is_known & (is_output == 0))
    tl.atomic_add(at, tl.full((BLOCK,), 1, tl.int32), mask=is_known & is_output)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _penalize_kernel(
    logits_ptr, counts_ptr, indices_ptr, tokens_ptr, row_ids_ptr, seq_lens_ptr, stride,
    repetition_ptr, frequency_ptr, presence_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq_len = tl.load(seq_lens_ptr + sequence)
    row = tl.load(row_ids_ptr + sequence).to(tl.int64)
    is_known = positions < seq_len
    tokens = tl.load(tokens_ptr + row * stride + positions, mask=is_known, other=0)
    taken = tl.atomic_xchg(
        counts_ptr + sequence * SIZE + tokens, tl.full((BLOCK,), 0, tl.int32), mask=is_known
    )
    is_first = is_known & (taken != 0)
    count = (taken & (_IN_PROMPT - 1)).to(tl.float32)
    repetition = tl.load(repetition_ptr + sequence)
    frequency = tl.load(frequency_ptr + sequence)
    presence = tl.load(presence_ptr + sequence)
    at = logits_ptr + tl.load(indices_ptr + sequence) * SIZE + tokens
    logits = tl.load(at, mask=is_first, other=0.0)
    divided = tl.div_rn(logits, tl.zeros((BLOCK,), tl.float32) + repetition)
    logits = tl.where(logits > 0, divided, logits * repetition)
    logits = logits - frequency * count
    logits = logits - presence * (count > 0).to(tl.float32)
    tl.store(at, logits, mask=is_first)


def penalize_tokens(
    logits: torch.Tensor,
    indices: torch.Tensor,
    tokens: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Changes logits in place; see models.ops.sampling.penalize_tokens."""
    size, num_rows = logits.shape[1], len(indices)
    counts = torch.zeros(num_rows, size, dtype=torch.int32, device=logits.device)
    grid = (triton.cdiv(tokens.shape[1], _BLOCK), num_rows)
    _count_kernel[grid](
        counts, tokens, row_ids, seq_lens, num_prompt_tokens, tokens.stride(0),
        SIZE=size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _penalize_kernel[grid](
        logits, counts, indices, tokens, row_ids, seq_lens, tokens.stride(0),
        repetition, frequency, presence,
        SIZE=size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
