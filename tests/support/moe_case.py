"""Tokens, logits and experts with random contents, and ways to route them."""

import math
from dataclasses import fields, replace
from functools import partial

import torch

from models.number_formats import BLOCK, FP8, MXFP4_RUN
from models.operands.experts import ExpertWeights, Routing
from models.operands.run_scales import fill_tiled, integer_words, tiled_shape
from models.ops.experts.expert_formats import expert_values

ROUTINGS = {
    "softmax": Routing(
        top_k=3, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
    ),
    "softmax-groups": Routing(
        top_k=3, is_sigmoid=False, is_normed=False, scaling=16.0, num_groups=3, top_groups=2
    ),
    "sigmoid-groups": Routing(
        top_k=4, is_sigmoid=True, is_normed=True, scaling=2.5, num_groups=4, top_groups=2
    ),
    "all": Routing(
        top_k=12, is_sigmoid=False, is_normed=False, scaling=1.0, num_groups=1, top_groups=1
    ),
}
NUM_EXPERTS = 12
"""The experts and tokens that ROUTINGS are made for."""


def make_logits(num_tokens, routing, *, num_experts=NUM_EXPERTS, device="cpu", seed=0):
    """Returns router logits, and a correction bias where the routing has one."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, device=device)
    bias = torch.randn(num_experts, generator=generator, device=device)
    return logits, bias if routing.is_sigmoid else None


def make_experts(
    *,
    num_experts=NUM_EXPERTS,
    hidden=36,
    inner=20,
    dtype=torch.float32,
    device="cpu",
    is_clamped=False,
    seed=0,
):
    """Returns experts; clamped ones have biases."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        values = torch.randn(*shape, generator=generator, device=device)
        return (values * shape[-1] ** -0.5).to(dtype)

    weights = {
        "gate_up": draw(num_experts, 2 * inner, hidden),
        "down": draw(num_experts, hidden, inner),
    }
    if not is_clamped:
        return ExpertWeights(**weights)
    return ExpertWeights(
        **weights,
        gate_up_bias=draw(num_experts, 2 * inner),
        down_bias=draw(num_experts, hidden),
        alpha=1.702,
        limit=0.5,
    )


def make_quantized_experts(
    kind, *, num_experts=NUM_EXPERTS, hidden=64, inner=96, device="cpu", is_clamped=False,
    is_squared=False, dtype=torch.float32, seed=0,
):  # fmt: skip
    """Returns experts in a format of models.ops.experts.expert_formats; biases have `dtype`.

    Kinds are fp8, with scales by block, fp8-rows, mxfp4, nvfp4, and int4-32, int4-64 and int4-128,
    by how many columns share a scale and a zero point.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = _DRAWERS[kind]
    weights = {"is_squared": is_squared}
    parts = 1 if is_squared else 2
    for name, rows, size, num_parts in (
        ("gate_up", inner, hidden, parts), ("down", hidden, inner, 1)
    ):  # fmt: skip
        matrices = [draw(num_experts, rows, size, generator) for _ in range(num_parts)]
        values, scales = zip(*matrices, strict=True)
        weights[name] = torch.cat(values, dim=1)
        if kind.startswith("fp8"):
            weights[f"{name}_scale"] = torch.cat(scales, dim=1)
        else:
            weights[f"{name}_scale"] = tiled(scales, size // scales[0].shape[-1])
    if is_clamped:
        sizes = {"gate_up_bias": 2 * inner, "down_bias": hidden}
        for name, size in sizes.items():
            bias = torch.randn(num_experts, size, generator=generator, device=device)
            weights[name] = (bias * size**-0.5).to(dtype)
        weights |= {"alpha": 1.702, "limit": 0.5}
    return ExpertWeights(**weights)


def tiled(scales, group=MXFP4_RUN):
    """Returns the scales of stacked matrices, [..., N, K / group] each, in tile order."""
    *experts, num_rows, num_groups = scales[0].shape
    shape = *experts, *tiled_shape(len(scales) * num_rows, num_groups * group, group)
    result = scales[0].new_empty(shape)
    for part, scale in enumerate(scales):
        fill_tiled(result, scale, part, len(scales))
    return result


def _draw_fp8(num_experts, rows, size, generator):
    """Returns stacked matrices and their scales, which differ from block to block."""
    grid = (num_experts, -(-rows // BLOCK), -(-size // BLOCK))
    return _draw_scaled(num_experts, rows, size, generator, grid)


def _draw_fp8_rows(num_experts, rows, size, generator):
    """Returns stacked matrices and their scales, which differ from row to row."""
    return _draw_scaled(num_experts, rows, size, generator, (num_experts, rows, 1))


def _draw_scaled(num_experts, rows, size, generator, grid):
    device = generator.device
    values = torch.randn(num_experts, rows, size, generator=generator, device=device)
    scale = torch.rand(grid, generator=generator, device=device) + 0.5
    return (values * 64).clamp(-448, 448).to(FP8), scale * size**-0.5 / 64


def _draw_mxfp4(num_experts, rows, size, generator):
    """Returns packed matrices and the exponents of their scales."""
    device = generator.device
    shape = (num_experts, rows, size // 2)
    packed = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    # Values are about 3; sums of this many products should come out near 1.
    middle = 125 - round(math.log2(size) / 2)
    shape = (num_experts, rows, size // 32)
    return packed, torch.randint(
        middle - 2, middle + 2, shape, generator=generator, device=device, dtype=torch.uint8
    )


def _draw_nvfp4(num_experts, rows, size, generator):
    """Returns packed matrices and their scales."""
    device = generator.device
    shape = (num_experts, rows, size // 2)
    packed = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    scale = torch.rand(num_experts, rows, size // 16, generator=generator, device=device) + 0.5
    # Values are about 3 times the scale; sums of this many products should come out near 1.
    return packed, (scale * size**-0.5 / 3).bfloat16()


def _draw_int4(num_experts, rows, size, generator, group):
    """Returns packed matrices, and words of their scales and zero points."""
    device = generator.device
    shape = (num_experts, rows, size // 2)
    packed = torch.randint(256, shape, generator=generator, device=device, dtype=torch.uint8)
    shape = (num_experts, rows, size // group)
    zero = torch.randint(16, shape, generator=generator, device=device, dtype=torch.uint8)
    # Values are about 7 times the scale; sums of this many products should come out near 1.
    scale = torch.rand(shape, generator=generator, device=device) + 0.5
    return packed, integer_words((scale * size**-0.5 / 7).bfloat16(), zero)


_DRAWERS = {
    "fp8": _draw_fp8,
    "fp8-rows": _draw_fp8_rows,
    "mxfp4": _draw_mxfp4,
    "nvfp4": _draw_nvfp4,
    **{f"int4-{group}": partial(_draw_int4, group=group) for group in (32, 64, 128)},
}


def exactly(experts):
    """Returns the same experts in float64.

    Integers and NVFP4 are multiplied as what dequantising to bfloat16 gives.
    """

    def double(x):
        return None if x is None else x.detach().double()

    def values(weights, scales, num_parts):
        if scales is None:
            return double(weights)
        is_rounded = scales.dtype in (torch.int32, torch.bfloat16)
        dtype = torch.bfloat16 if is_rounded else torch.float64
        pairs = zip(weights, scales, strict=True)
        each = [expert_values(*pair, dtype, num_parts=num_parts) for pair in pairs]
        return torch.stack(each).double()

    return ExpertWeights(
        gate_up=values(experts.gate_up, experts.gate_up_scale, experts.num_parts),
        down=values(experts.down, experts.down_scale, 1),
        gate_up_bias=double(experts.gate_up_bias),
        down_bias=double(experts.down_bias),
        alpha=experts.alpha,
        limit=experts.limit,
        adds_one=experts.adds_one,
        is_squared=experts.is_squared,
    )


def part_of(experts, own):
    """Returns only some experts, which tokens choose from all of."""
    chosen = {
        field.name: getattr(experts, field.name)[list(own)]
        for field in fields(experts)
        if isinstance(getattr(experts, field.name), torch.Tensor)
    }
    return replace(experts, num_routed=len(experts.down), **chosen)
