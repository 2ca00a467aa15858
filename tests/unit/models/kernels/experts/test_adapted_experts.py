"""Experts with adapters in Triton's interpreter equal the reference."""

from tests.support.programs import run_interpreted

PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from models.batch_invariance import use_batch_invariance
from models.kernels.experts.adapted_experts import apply_adapted
from models.kernels.experts.fp8.moe_fp8 import apply_fp8
from models.ops.experts import moe as reference
from tests.support.expert_adapter_case import exact_adapters, make_expert_adapters
from tests.support.moe_case import (
    ROUTINGS, exactly, make_experts, make_logits, make_quantized_experts, part_of
)
from tests.support.tolerances import assert_rows_close

routing = ROUTINGS["sigmoid-groups"]
gated = make_experts(hidden=64, inner=48)
formats = {
    "gated": gated,
    "clamped": make_experts(is_clamped=True),
    "squared": replace(gated, gate_up=gated.gate_up[:, :48].contiguous(), is_squared=True),
    "gelu": replace(gated, is_gelu=True),
    "fp8": make_quantized_experts("fp8", hidden=64, inner=128),
    "fp8-rows": make_quantized_experts("fp8-rows", hidden=64, inner=96, is_clamped=True),
    "mxfp4": make_quantized_experts("mxfp4", is_clamped=True),
    "some": part_of(gated, range(0, 12, 2)),
    "mxfp4-squared": make_quantized_experts("mxfp4", is_squared=True),
}
for number, (name, experts) in enumerate(formats.items()):
    # Activations differ in nothing that depends on the tokens.
    few = () if name in ("clamped", "squared", "gelu") else (1 if number % 2 else 9,)
    for num_tokens in (*few, 60):
        adapters = make_expert_adapters(experts, num_tokens, seed=num_tokens)
        experts = replace(experts, adapters=adapters)
        hidden = torch.randn(num_tokens, experts.down.shape[1])
        weights, ids = reference.route(*make_logits(num_tokens, routing), routing)
        if name == "some":
            # Others are on another rank.
            ids, weights = torch.where(ids % 2 == 0, ids // 2, 6), weights * (ids % 2 == 0)
        exact = reference.apply_experts(
            hidden.double(), weights.double(), ids,
            replace(exactly(experts), adapters=exact_adapters(adapters), is_gelu=experts.is_gelu),
            rounds_activations=experts.is_fp8,
        )
        output = torch.empty_like(hidden)
        apply_adapted(hidden, weights, ids.int(), experts, output)
        if experts.is_fp8:
            # The interpreter rounds to FP8 in another way than torch.
            assert (output.double() - exact).norm() < 0.15 * exact.norm(), (name, num_tokens)
        else:
            assert_rows_close(output, exact)
        first = replace(experts, adapters=replace(adapters, slots=torch.zeros_like(adapters.slots)))
        none = torch.empty_like(hidden)
        apply_adapted(hidden, weights, ids.int(), first, none)
        if experts.is_fp8:
            fused = torch.empty_like(hidden)
            apply_fp8(hidden, weights, ids.int(), experts, fused)
            assert (none - fused).norm() < 0.01 * fused.norm(), (name, num_tokens)
        is_without = adapters.slots[:num_tokens] == 0
        assert torch.equal(none[is_without], output[is_without])
        assert not torch.equal(none[~is_without], output[~is_without]) or bool(is_without.all())

use_batch_invariance(is_on=True)
hidden = torch.randn(60, gated.down.shape[1])
weights, ids = reference.route(*make_logits(60, routing), routing)
experts = replace(gated, adapters=make_expert_adapters(gated, 60))
together = torch.empty_like(hidden)
apply_adapted(hidden, weights, ids.int(), experts, together)
for count in (1, 9):
    own = torch.empty_like(hidden[:count])
    apply_adapted(hidden[:count], weights[:count], ids[:count].int(), experts, own)
    assert torch.equal(own, together[:count])
"""


def test_every_format_equals_the_reference():
    run_interpreted(PROGRAM)
