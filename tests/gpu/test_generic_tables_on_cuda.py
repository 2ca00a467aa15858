"""A GPU that counts as one without tables of its own: attention, experts and a model."""

import pytest
import torch

from models.kernels.gpu import gpu_of, is_hopper
from models.loading.loader import load_model
from models.operands.experts import Routing
from models.ops.experts import moe as reference
from tests.support.attention_case import Heads, make_case
from tests.support.gpu_facts import generic_tables
from tests.support.latent_case import make_latent_case
from tests.support.moe_case import exactly, make_experts, make_logits, make_quantized_experts
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import transformers_logits, write_checkpoint
from tests.support.tolerances import FP8_EXPERTS_ERROR, assert_rows_close

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ROUTING = Routing(
    top_k=4, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
)
BATCHES = {
    "decodes": ([1] * 9, [5, 600, 1, 33, 4000, 16, 17, 128, 1000]),
    "first-chunks": ([33, 129, 640], [33, 129, 640]),
    "later-chunks": ([33, 129, 640], [34, 1000, 700]),
    "mixed": ([1, 300, 1, 33], [40, 300, 1, 1033]),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _has_no_tables():
    with generic_tables():
        assert not is_hopper(DEVICE)
        assert gpu_of(DEVICE).is_generic
        yield


@DTYPES
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_is_the_references(head_dim, batch, dtype):
    heads = Heads(num_heads=16, num_kv_heads=4, head_dim=head_dim)
    case = make_case(*batch, heads, dtype=dtype, device="cuda")
    expected = case.exact().run()
    assert_rows_close(case.run(), expected)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_to_an_fp8_cache_is_the_references(head_dim, batch):
    heads = Heads(num_heads=16, num_kv_heads=4, head_dim=head_dim)
    case = make_case(*batch, heads, dtype=torch.bfloat16, device="cuda", has_fp8_cache=True)
    output = case.run()
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("num_queries", [1, 300])
def test_latent_attention_is_the_references(num_queries):
    sizes = {"latent_dim": 512, "rope_dim": 64, "plain_dim": 128, "value_dim": 128}
    case = make_latent_case(
        [num_queries], [700], num_heads=16, dtype=torch.bfloat16, device="cuda", **sizes
    )
    expected = case.exact().run()
    assert_rows_close(case.run(), expected)


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 8, 100, 700])
def test_experts_are_the_references(num_tokens, dtype):
    from models.kernels.experts.moe import apply_experts

    experts = make_experts(num_experts=16, hidden=256, inner=192, dtype=dtype, device="cuda")
    call = routed(experts, num_tokens, dtype)
    assert_rows_close(apply_experts(*call, experts), exact_output(experts, call))


@pytest.mark.parametrize("num_tokens", [1, 8, 100, 700])
def test_fp8_experts_are_near_those_of_unrounded_activations(num_tokens):
    from models.kernels.experts.moe import apply_experts

    experts = make_quantized_experts("fp8", dtype=torch.bfloat16, device="cuda")
    call = routed(experts, num_tokens, torch.bfloat16)
    actual, exact = apply_experts(*call, experts).double(), exact_output(experts, call)
    assert (actual - exact).norm() / exact.norm() < FP8_EXPERTS_ERROR


@pytest.mark.parametrize("variant", ["qwen3", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_model_gives_the_logits_of_transformers(tmp_path, variant):
    source = write_checkpoint(tmp_path, variant)
    tokens = [(7 * place) % 97 for place in range(43)]
    expected = transformers_logits(source, tokens)
    runner = PagedRunner(load_model(tmp_path, device=DEVICE, dtype=torch.float32), device=DEVICE)
    sequence = runner.add(tokens)
    pieces = [runner.step([(sequence, 20)])[0], runner.step([(sequence, 9)])[0]]
    actual = torch.cat([*pieces, runner.run(sequence, 1)]).float().cpu()
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def routed(experts, num_tokens, dtype):
    """Returns what the kernels are called with, beside the experts."""
    num_experts, hidden_size = experts.down.shape[:2]
    logits, bias = make_logits(num_tokens, ROUTING, num_experts=num_experts, device="cuda")
    weights, ids = reference.route(logits, bias, ROUTING)
    return torch.randn(num_tokens, hidden_size, device="cuda").to(dtype), weights, ids.int()


def exact_output(experts, call):
    hidden, weights, ids = call
    return reference.apply_experts(hidden.double(), weights.double(), ids.long(), exactly(experts))
