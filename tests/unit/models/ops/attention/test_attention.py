from dataclasses import replace

import pytest
import torch

from models.forward_context import forward_context
from models.layers.attention import Attention
from models.loading.loader import load_model
from models.operands.rounded_activations import rounded_parts
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import rotary
from models.ops.products.fp8_linear import quantize
from tests.support.attention_case import Heads, make_case
from tests.support.paged_runner import PagedRunner

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HEADS = Heads(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)


@pytest.fixture
def runner(checkpoint):
    folder, _ = checkpoint("llama")
    return PagedRunner(load_model(folder, device=CPU, dtype=torch.float32))


def random_heads(num_tokens):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(num_tokens, heads, HEAD_DIM, generator=generator)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    ]


def prepare(runner, chunks):
    for sequence, num_tokens in chunks:
        runner._grow(sequence, sequence.num_cached + num_tokens)
    return runner.prepare(chunks)[1]


def test_only_the_output_is_written(runner):
    context = prepare(runner, [(runner.add([1] * 6), 6)])
    q, k, v = random_heads(6)
    before = [tensor.clone() for tensor in (q, k, v)]
    output = torch.full_like(q, torch.nan)
    with forward_context(context):
        torch.ops.octavo.unified_attention_with_output(q, k, v, output, 0)
    assert output.isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_layer_writes_the_cache_of_its_own_number_only(runner):
    context = prepare(runner, [(runner.add([1] * 6), 6)])
    untouched = runner.kv_caches[0].k.clone()
    with forward_context(context):
        Attention(1)(*random_heads(6))
    assert torch.equal(runner.kv_caches[0].k, untouched)
    assert not torch.equal(runner.kv_caches[1].k, untouched)


def test_first_token_attends_to_itself_alone(runner):
    context = prepare(runner, [(runner.add([1]), 1)])
    q, k, v = random_heads(1)
    with forward_context(context):
        output = Attention(0)(q, k, v).view(NUM_HEADS, HEAD_DIM)
    torch.testing.assert_close(output, v[0].repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0))


@pytest.mark.parametrize("options", [{}, {"has_norm": False}, {"has_rotation": False}], ids=str)
def test_operator_passes_torchs_own_checks(options):
    case = make_case([5, 1], [5, 9], HEADS, **options)
    with forward_context(case.context()):
        torch.library.opcheck(
            torch.ops.octavo.unified_attention_with_output.default,
            case.arguments(torch.zeros(case.q.shape)),
        )


@pytest.mark.parametrize("has_norm", [True, False])
def test_rotating_inside_the_operator_is_rotating_before_it(has_norm):
    case = make_case([5, 1], [7, 9], HEADS, has_norm=has_norm)
    turn = case.transform
    q, k = case.q, case.k
    if has_norm:
        q, k = rms_norm(q, turn.q_weight, turn.eps), rms_norm(k, turn.k_weight, turn.eps)
    q, k = (rotary(x, turn.cos, turn.signed_sin) for x in (q, k))
    before = replace(case, q=q, k=k, transform=None)
    assert torch.equal(case.run(), before.run())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [([5, 1], [7, 9]), ([1, 1], [3, 0]), ([1], [4])], ids=str)
def test_rounding_inside_the_operator_is_rounding_after_it(batch, dtype):
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=128)
    plain = make_case(*batch, heads, dtype=dtype).run()
    rounded = replace(make_case(*batch, heads, dtype=dtype), rounds=True).run()
    if dtype is torch.float32 or len(plain) > 1:
        expected = quantize(plain.flatten(1), 128)
        for part, each in zip(rounded_parts(rounded), expected, strict=True):
            assert torch.equal(part.float(), each.float())
    else:
        assert torch.equal(rounded, plain)


def test_tokens_past_the_slot_mapping_are_not_written(runner):
    context = prepare(runner, [(runner.add([1] * 6), 6)])
    q, k, v = random_heads(8)
    expected = runner.kv_caches[0].k.clone()
    expected.flatten(0, 1)[context.attn_metadata.slot_mapping] = k[:6]
    with forward_context(context):
        torch.ops.octavo.unified_attention_with_output(q, k, v, torch.empty_like(q), 0)
    assert torch.equal(runner.kv_caches[0].k, expected)


def test_operator_outside_a_forward_pass_fails(runner):
    q, k, v = random_heads(1)
    with pytest.raises(RuntimeError, match="no forward context is set"):
        Attention(0)(q, k, v)
