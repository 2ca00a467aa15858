"""A kernel that stores the part of each program; Triton reads kernels from files."""

import triton
import triton.language as tl

from models.kernels.attention.key_parts import deal_keys


@triton.jit
def store_parts(
    out_ptr, seq_lens_ptr, starts_ptr, num_requests, window: tl.constexpr, dealt: tl.constexpr,
    keys: tl.constexpr, least_part: tl.constexpr, only_single_tokens: tl.constexpr,
    has_new: tl.constexpr, even_parts: tl.constexpr,
):  # fmt: skip
    """Stores the five results of deal_keys."""
    place = tl.program_id(0)
    request, split, part, active, num_before = deal_keys(
        place, num_requests, seq_lens_ptr, starts_ptr, window, dealt, keys, least_part,
        only_single_tokens, has_new, False, even_parts,
    )  # fmt: skip
    tl.store(out_ptr + place * 5 + 0, request)
    tl.store(out_ptr + place * 5 + 1, split)
    tl.store(out_ptr + place * 5 + 2, part)
    tl.store(out_ptr + place * 5 + 3, active)
    tl.store(out_ptr + place * 5 + 4, num_before)
