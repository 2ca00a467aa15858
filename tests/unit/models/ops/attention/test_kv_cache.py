import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from models.ops.attention.kv_cache import quantize_heads
from tests.support.attention_case import Heads, exact_cache, make_case
from tests.support.paged_runner import PagedRunner
from tests.support.tolerances import FP8_ROW_TOLERANCE, assert_rows_close

CPU = torch.device("cpu")
HEADS = Heads(num_heads=6, num_kv_heads=2, head_dim=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 6e4], ids=str)
def test_no_number_is_off_by_more_than_a_sixteenth(size, dtype):
    drawn = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1))
    heads = (drawn * size / 6).to(dtype)
    stored, scales = quantize_heads(heads)
    assert (stored.dtype, scales.dtype) == (FP8_CACHE_DTYPE, torch.float32)
    exact = heads.double()
    error = (stored.double() * scales.double().unsqueeze(-1) - exact).abs()
    allowed = exact.abs() / 16 + scales.double().unsqueeze(-1) * 2**-10
    assert (error <= allowed * (1 + 1e-5)).all()


def test_each_heads_largest_number_is_kept():
    heads = torch.tensor([[3.0, -7.0, 0.5], [100.0, 1e5, -1.0]])
    stored, scales = quantize_heads(heads)
    kept = stored.float() * scales.unsqueeze(-1)
    torch.testing.assert_close(kept.abs().amax(-1), torch.tensor([7.0, 1e5]))


def test_scales_of_each_head_are_never_worse_than_a_checkpoints():
    generator = torch.Generator().manual_seed(2)
    # Heads of tokens differ by a factor of 100, and some numbers stand out.
    sizes = torch.rand(400, 8, 1, generator=generator) * 2 - 1
    heads = torch.randn(400, 8, 64, generator=generator) * 10**sizes
    heads[::7, :, 3] *= 8
    stored, scales = quantize_heads(heads)
    own = (stored.float() * scales.unsqueeze(-1) - heads).square()
    calibrated = heads.abs().amax() / 448
    for scale in (calibrated, calibrated / 2, calibrated / 64, torch.tensor(1.0)):
        rounded = (heads / scale).clamp(-448, 448).to(FP8_CACHE_DTYPE).float() * scale
        static = (rounded - heads).square()
        assert own.sum() <= 1.05 * static.sum()
        # What rounding costs a small head relative to itself is where they differ.
        relative = [(each.sum(-1) / heads.square().sum(-1)).mean() for each in (own, static)]
        assert relative[0] <= 1.05 * relative[1]
    # A scale that is a multiple by a power of two keeps a part of the numbers, so none is nearer.
    for factor in (1, 2, 64, 2**12):
        coarser = scales.unsqueeze(-1) * factor
        static = ((heads / coarser).to(FP8_CACHE_DTYPE).float() * coarser - heads).square()
        assert (own <= static * (1 + 1e-5)).all()


def test_a_head_of_zeros_stays_zero():
    stored, scales = quantize_heads(torch.zeros(2, 8))
    assert stored.float().count_nonzero() == 0
    assert (scales > 0).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7, "has_sinks": True}, {"has_rotation": False, "block_size": 5}],
    ids=str,
)
@pytest.mark.parametrize("batch", [([5, 1], [7, 9]), ([1] * 3, [1, 40, 16])], ids=str)
def test_attention_reads_what_it_has_rounded(batch, options):
    case = make_case(*batch, HEADS, has_fp8_cache=True, **options)
    exact = case.exact()
    exact.run()
    output = case.run()
    assert_rows_close(output, case.exact_reading().run())
    stored = exact_cache(case.cache)
    assert_rows_close(stored.k[1:], exact.cache.k[1:], FP8_ROW_TOLERANCE)
    assert_rows_close(stored.v[1:], exact.cache.v[1:], FP8_ROW_TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_a_model_makes_the_same_of_chunks_and_of_single_tokens(checkpoint, family):
    folder, _ = checkpoint(family)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    tokens = torch.randint(97, (30,), generator=torch.Generator().manual_seed(2)).tolist()

    def run(chunk_size, cache_dtype=None):
        runner = PagedRunner(model, cache_dtype=cache_dtype)
        return runner.run(runner.add(tokens), chunk_size)

    single, whole, own = run(1, FP8_CACHE_DTYPE), run(30, FP8_CACHE_DTYPE), run(30)
    assert 0.01 < (whole - own).norm() / own.norm() < 0.25
    # A number near the middle of two may be rounded the other way, which is rare.
    assert (single - whole).norm() / own.norm() < 0.02
