"""The sum over ranks with residual and norm: its bits, its fallbacks, and no multicast anywhere."""

import re
from pathlib import Path

import pytest
import torch

from models.number_formats import BLOCK, FP8
from models.ops.elementwise.rms_norm import add_rms_norm
from models.ops.products import norm_linear
from models.ops.products.all_reduce_norm_linear import all_reduce_norm_linear
from models.ops.products.fp8_linear import quantize
from models.ops.ranks.all_reduce_norm import all_reduce_norm, ordered_sum_norm
from models.parallel import collectives
from models.parallel.collectives import LostPeerError, check_arrivals, without_other_ranks
from services.engine.config.engine_config import EngineConfig
from services.engine.worker.environment import worker_environment
from tests.support.gloo_ranks import run_ranks

ROOT = Path(__file__).parents[5]
EPS = 1e-6
SUMS = """
from models.ops.ranks.all_reduce import all_reduce
from models.number_formats import FP8
from models.ops.ranks.all_reduce_norm import all_reduce_norm
from models.ops.products.all_reduce_norm_linear import all_reduce_norm_linear
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.products.linear import linear

weight = torch.linspace(0.5, 2, 24)
product = torch.linspace(-2, 2, 16 * 24).view(16, 24).to(FP8)
scale = torch.linspace(0.5, 1, 16).view(16, 1)
results = []
for num_rows in (1, 5, 300):
    x = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(rank))
    residual = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(9))
    total = residual + all_reduce(x, "tensor_parallel")
    normed = all_reduce_norm(x, residual, weight, 1e-6, "tensor_parallel")
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    results.append((residual, normed))
    for is_gated in (False, True):
        stream = residual.clone()
        total = stream + all_reduce(x, "tensor_parallel")
        fused = all_reduce_norm_linear(
            x, stream, weight, 1e-6, "tensor_parallel", product, None, is_gated, scale
        )
        expected = linear(rms_norm(total, weight, 1e-6), product, None, scale)
        assert torch.equal(stream, total)
        assert torch.equal(fused, silu_and_mul(expected) if is_gated else expected)
"""


class Late:
    """A fused sum that one rank does not join."""

    def __init__(self, *, fits=True):
        self._fits = fits

    def fits(self, x, residual, weight):
        return self._fits

    def add_norm(self, x, residual, weight, eps):
        return torch.full_like(residual, 7.0)

    def add_rounded_norm(self, x, residual, weight, eps, *, is_blocked):
        size = residual.shape[1]
        return quantize(self.add_norm(x, residual, weight, eps), BLOCK if is_blocked else size)

    def check(self):
        raise LostPeerError("rank 3 did not send its part of a sum in time")


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_bits_of_the_separate_operators(tmp_path, size):
    first, *others = run_ranks(SUMS, size, tmp_path)
    for other in others:
        for pairs in zip(first, other, strict=True):
            assert all(map(torch.equal, *pairs))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ordered_sum_of_a_row_depends_on_no_other_row(size, dtype):
    draws = torch.Generator().manual_seed(size)
    parts = torch.randn(size, 40, 24, generator=draws).to(dtype)
    residual = torch.randn(40, 24, generator=draws).to(dtype)
    weight = torch.randn(24, generator=draws).to(dtype)
    together = residual.clone()
    ordered_sum_norm(parts, together, weight, EPS)
    for row in range(40):
        alone = residual[row : row + 1].clone()
        ordered_sum_norm(parts[:, row : row + 1], alone, weight, EPS)
        assert torch.equal(alone[0], together[row])
    exact = parts.double().sum(0) + residual.double()
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(together.double(), exact, rtol=tolerance, atol=tolerance)


def test_without_other_ranks_the_residual_gets_the_own_part():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected_residual = residual.clone()
    expected = add_rms_norm(x, expected_residual, weight, EPS)
    with without_other_ranks():
        normed = all_reduce_norm(x, residual, weight, EPS, "absent")
        given = (x, residual, weight, EPS, "absent")
        torch.library.opcheck(torch.ops.octavo.all_reduce_norm.default, given)
    assert torch.equal(normed, expected)
    assert torch.equal(residual, expected_residual)


def test_the_fused_sum_of_a_group_runs_and_a_late_rank_is_named(monkeypatch):
    monkeypatch.setattr(collectives, "_fused", {})
    collectives.use_fused_sum("some", Late())
    x = torch.ones(2, 8)
    before = collectives.num_issued()
    assert all_reduce_norm(x, x.clone(), x[0], EPS, "some").eq(7).all()
    assert collectives.num_issued() == before + 1
    with without_other_ranks():
        assert not all_reduce_norm(x, x.clone(), x[0], EPS, "some").eq(7).any()
    with pytest.raises(LostPeerError, match="rank 3"):
        check_arrivals()


def test_a_product_follows_the_fused_sum(monkeypatch):
    monkeypatch.setattr(collectives, "_fused", {})
    collectives.use_fused_sum("some", Late())
    x, weight = torch.ones(2, 8), torch.randn(6, 8)
    given = (x[0], EPS, "some", weight, None, False)
    before = collectives.num_issued()
    output = all_reduce_norm_linear(x, x.clone(), *given)
    torch.testing.assert_close(output, torch.full_like(x, 7.0) @ weight.T)
    assert collectives.num_issued() == before + 1
    with without_other_ranks():
        torch.library.opcheck(
            torch.ops.octavo.all_reduce_norm_linear.default, (x, x.clone(), *given)
        )


@pytest.mark.parametrize("scale", [torch.rand(6, 1), torch.rand(1, 2)], ids=["rows", "blocks"])
def test_the_fused_sum_rounds_the_input_of_a_product_of_many_tokens(monkeypatch, scale):
    monkeypatch.setattr(collectives, "_fused", {})
    collectives.use_fused_sum("some", Late())
    monkeypatch.setattr(norm_linear, "has_kernels", lambda device: True)
    products = []

    def product(rounded, scales, weight, weight_scale, bias, dtype):
        products.append((rounded, scales))
        return rounded.float() @ weight.float().T

    monkeypatch.setattr(norm_linear, "product_of_rounded", product)
    x, weight = torch.ones(2, 256).bfloat16(), torch.randn(6, 256).to(FP8)
    product_of = (x[0], EPS, "some", weight, None, False, scale)
    before = collectives.num_issued()
    output = all_reduce_norm_linear(x, x.clone(), *product_of)
    ((rounded, scales),) = products
    assert rounded.dtype is FP8
    assert scales.shape == (2, 1 if scale.shape[1] == 1 else 2)
    assert torch.equal(output, rounded.float() @ weight.float().T)
    assert collectives.num_issued() == before + 1


def test_workers_start_without_multicast_whatever_the_environment_says(monkeypatch, tmp_path):
    names = {
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    for name, off in names.items():
        monkeypatch.setenv(name, "1" if off == "0" else "0")
    config = EngineConfig.from_flags(model=tmp_path, compile_cache_dir=tmp_path / "code")
    environment = worker_environment(config, "lo", tmp_path)
    assert {name: environment[name] for name in names} == names


def test_no_code_uses_multicast():
    uses = re.compile(
        r"multimem|multicast_ptr|MulticastCreate|NCCL_NVLS_ENABLE\W+[1-9]"
        r"|DISABLE_(MULTICAST|NVLS)\W+0"
    )
    files = [
        path for folder in ("models", "services", "tests/bench", "tests/gpu", "scripts", "deploy")
        for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]  # fmt: skip
    assert len(files) > 500
    assert not [path for path in files if uses.search(path.read_text(errors="ignore"))]
