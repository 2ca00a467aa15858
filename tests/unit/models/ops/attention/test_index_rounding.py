"""Queries and keys of an indexer in FP8, with scales that are powers of two."""

from dataclasses import replace

import pytest
import torch

from models.number_formats import FP8, FP8_MAX, SMALLEST_INDEX_AMAX
from models.ops.attention.index_rounding import quantize_index
from tests.support.latent_case import make_latent_case

SIZES = {"num_heads": 3, "latent_dim": 16, "rope_dim": 4}


@pytest.mark.parametrize("size", [1e-6, 0.3, 1.0, 900.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_are_the_least_powers_of_two_that_fit(dtype, size):
    heads = (torch.randn(50, 7, 128, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    rounded, scales = quantize_index(heads)
    assert (rounded.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (50, 7))
    largest = heads.abs().amax(-1).float().clamp(min=SMALLEST_INDEX_AMAX)
    expected = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    assert torch.equal(scales, expected)
    error = (rounded.float() * scales.unsqueeze(-1) - heads.float()).norm()
    # Under the least magnitude elements are among FP8's subnormals.
    assert error <= (0.03 if size > SMALLEST_INDEX_AMAX else 0.2) * heads.float().norm()


def test_zeros_stay_zeros():
    rounded, scales = quantize_index(torch.zeros(3, 8))
    assert rounded.float().count_nonzero() == 0
    assert (scales > 0).all()


@pytest.mark.parametrize("batch", [([4, 1], [9, 17]), ([1, 1], [40, 33])], ids=str)
def test_with_a_cache_of_8_bits_scores_are_those_of_rounded_queries_and_keys(batch):
    case = make_latent_case(*batch, **SIZES, top_k=4, has_fp8_cache=True)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(case.index.q.shape, generator=generator)
    keys = torch.randn(case.entries.index_keys.shape, generator=generator)
    case = replace(
        case,
        index=replace(case.index, q=queries),
        entries=replace(case.entries, index_keys=keys),
    )
    output = case.run()
    rounded, scales = quantize_index(queries)
    stored, factors = quantize_index(keys)
    slots = case.metadata.slot_mapping
    assert torch.equal(case.cache.index_keys.flatten(0, 1)[slots].float(), stored.float())
    assert torch.equal(case.cache.index_scale.flatten()[slots], factors)
    # The same choice from dequantised queries and keys, in a cache that rounds no more.
    dequantised = case.cache.index_keys.float() * case.cache.index_scale.unsqueeze(-1)
    plain = replace(
        case.exact_reading(),
        index=replace(case.index, q=rounded.float() * scales.unsqueeze(-1)),
    )
    plain = replace(
        plain,
        cache=replace(plain.cache, index_keys=dequantised, index_scale=None),
        entries=replace(plain.entries, index_keys=stored.float() * factors.unsqueeze(-1)),
    )
    torch.testing.assert_close(output.double(), plain.run(), rtol=1e-5, atol=1e-5)
