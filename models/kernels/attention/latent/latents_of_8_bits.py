"""The inner loop of latent attention over FP8 latent vectors."""

import triton
import triton.language as tl

from models.kernels.attention.decode.keys_of_8_bits import (
    in_float16,
    join_quarters,
    quarter_of,
    split_quarters,
)

_WEIGHT_FACTOR = tl.constexpr(256.0)
"""Keeps weights times scales out of float16's subnormal range; latent elements are under 10^5."""


@triton.jit
def attend_latents_of_8_bits(
    q_latent, q_rotated, cache, table_ptr, chosen_ptr, start, end, num_keys, scale_log2,
    form: tl.constexpr,
):  # fmt: skip
    """Returns the weighted sums of latent vectors, highest scores and sums of exponentials.

    form: LatentForm, whose `latent` is a multiple of 4. A latent vector is read in words of four
    elements, once for scores and sums, and multiplied in float16, unless queries are float32: see
    keys_of_8_bits. Its scale multiplies scores and weights.
    """
    q_latent, q_scale = in_float16(q_latent, form.heads)
    dtype: tl.constexpr = q_latent.dtype
    q_a, q_b, q_c, q_d = split_quarters(q_latent, form.heads, form.block_c)
    quarters = tl.arange(0, form.block_c // 4)
    rotated = tl.arange(0, form.block_p)
    words_ptr = cache.latent.to(tl.pointer_type(tl.uint32))
    highest = tl.full([form.heads], float("-inf"), tl.float32)
    total = tl.full([form.heads], 0.0, tl.float32)
    a = tl.full([form.heads, form.block_c // 4], 0.0, tl.float32)
    b = tl.full([form.heads, form.block_c // 4], 0.0, tl.float32)
    c = tl.full([form.heads, form.block_c // 4], 0.0, tl.float32)
    d = tl.full([form.heads, form.block_c // 4], 0.0, tl.float32)
    for first in tl.range(start, end, form.keys, num_stages=form.stages):
        keys = first + tl.arange(0, form.keys)
        is_key = keys < end
        if form.is_sparse:
            keys = tl.load(chosen_ptr + keys, mask=is_key, other=0)
            is_key = is_key & (keys < num_keys)
        block = tl.load(table_ptr + keys // form.block_size, mask=is_key, other=0).to(tl.int64)
        slots = block * form.block_size + keys % form.block_size
        words = tl.load(
            words_ptr + slots[:, None] * (form.latent // 4) + quarters[None, :],
            mask=is_key[:, None] & (quarters < form.latent // 4)[None, :],
            other=0,
        )
        k_scale = tl.load(cache.scale + slots, mask=is_key, other=0.0)
        k_rotated = tl.load(
            cache.rotated + slots[:, None] * form.rotated + rotated[None, :],
            mask=is_key[:, None] & (rotated < form.rotated)[None, :],
            other=0.0,
        )
        k_a = quarter_of(words, 0, dtype)
        k_b = quarter_of(words, 8, dtype)
        k_c = quarter_of(words, 16, dtype)
        k_d = quarter_of(words, 24, dtype)
        scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
        scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
        scores = tl.dot(q_c, tl.trans(k_c), scores, input_precision="ieee")
        scores = tl.dot(q_d, tl.trans(k_d), scores, input_precision="ieee")
        scores *= q_scale[:, None] * k_scale[None, :]
        k_rotated = k_rotated.to(q_rotated.dtype)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale_log2, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        if form.is_sparse:
            # A row may see no key of a tile; a finite number avoids inf - inf.
            new_highest = tl.maximum(new_highest, -1e30)
        weights = tl.exp2(scores - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weights, 1)
        highest = new_highest
        kept = kept[:, None]
        weights = (weights * (k_scale * _WEIGHT_FACTOR)[None, :]).to(dtype)
        a = tl.dot(weights, k_a, a * kept, input_precision="ieee")
        b = tl.dot(weights, k_b, b * kept, input_precision="ieee")
        c = tl.dot(weights, k_c, c * kept, input_precision="ieee")
        d = tl.dot(weights, k_d, d * kept, input_precision="ieee")
    acc = join_quarters(a, b, c, d, form.heads, form.block_c) * (1.0 / _WEIGHT_FACTOR)
    return acc, highest, total
