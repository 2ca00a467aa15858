"""Times experts and latent attention against the limits of memory and arithmetic.

    python -m tests.bench.experts [--json out.json] [--only experts,latent] [--tokens 1,32,2048]

Weights are random, in bfloat16 or as a checkpoint stores them, and experts are chosen by random
logits, so that tokens spread evenly. The floor of experts is reading those chosen once, as they are
stored, or their products, in FP8 at twice the rate of bfloat16; that of latent attention is reading
the cache once, or the products with it; `latent8` has a cache of 8 bits. Ceilings and method are
those of tests.bench.kernels.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from models.kernels.attention.latent.latent_attention import latent_attention
from models.kernels.experts.expert_forms import (
    OF_8_BITS,
    ON_CORES,
    first_tokens_of_each_form,
)
from models.kernels.experts.moe import apply_experts, route
from models.kv_cache import FP8_CACHE_DTYPE, LatentCacheSpec
from models.operands.experts import ExpertWeights, Routing
from tests.bench.kernels import BYTES_PER_US, FLOP_PER_US, copies, microseconds
from tests.support.latent_case import make_latent_case
from tests.support.moe_case import make_experts, make_logits, make_quantized_experts


def softmax(top_k: int) -> Routing:
    """Returns the plain routing."""
    return Routing(
        top_k=top_k, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
    )


DEEPSEEK = Routing(
    top_k=8, is_sigmoid=True, is_normed=True, scaling=2.5, num_groups=8, top_groups=4
)
QWEN3_30B = {"num_experts": 128, "hidden": 2048, "inner": 768}
GPT_OSS = {"num_experts": 32, "hidden": 2880, "inner": 2880, "is_clamped": True}
DEEPSEEK_V3 = {"num_experts": 256, "hidden": 7168, "inner": 2048}
MODELS = {
    "Qwen3-30B-A3B": ("bf16", QWEN3_30B, softmax(8)),
    "Qwen3-30B-A3B fp8": ("fp8", QWEN3_30B, softmax(8)),
    "Qwen3-30B-A3B int4": ("int4-128", QWEN3_30B, softmax(8)),
    "Qwen3-30B-A3B nvfp4": ("nvfp4", QWEN3_30B, softmax(8)),
    "gpt-oss-20b": ("bf16", GPT_OSS, softmax(4)),
    "gpt-oss-20b mxfp4": ("mxfp4", GPT_OSS, softmax(4)),
    "GLM-4.5-Air": ("bf16", {"num_experts": 128, "hidden": 4096, "inner": 1408}, softmax(8)),
    "Mixtral-8x7B": ("bf16", {"num_experts": 8, "hidden": 4096, "inner": 14336}, softmax(2)),
    "DeepSeek-V3": ("bf16", DEEPSEEK_V3, DEEPSEEK),
    "DeepSeek-V3 fp8": ("fp8", DEEPSEEK_V3, DEEPSEEK),
    "DeepSeek-V3 int4": ("int4-32", DEEPSEEK_V3, DEEPSEEK),
}
FORMS = {
    "fp8": (OF_8_BITS,),
    **dict.fromkeys(("mxfp4", "nvfp4", "int4-32", "int4-128"), (ON_CORES,)),
}
BYTES_PER_NUMBER = {
    "bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 2 / 16,
    "int4-32": 0.5 + 4 / 32, "int4-128": 0.5 + 4 / 128,
}  # fmt: skip
TOKENS = (1, 4, 8, 32, 128, 512, 2048, 8192)
LATENT_SIZES = {
    "DeepSeek-V3": {"num_heads": 128, "latent_dim": 512, "rope_dim": 64},
    "DeepSeek-V2-Lite": {"num_heads": 16, "latent_dim": 512, "rope_dim": 64},
}
LATENT_STEPS = [
    (1, 1, 256),
    (1, 1, 4096),
    (32, 1, 256),
    (32, 1, 4096),
    (128, 1, 4096),
    (1, 2048, 2048),
]
"""Requests, queries of each, and tokens of each sequence."""

Figures = dict[str, float]
"""Microseconds of the call (us) and of the floor (floor_us)."""


def make_layer(kind: str, shape: dict[str, int], seed: int) -> ExpertWeights:
    """Returns one layer's experts, their weights in a format."""
    make = make_experts if kind == "bf16" else partial(make_quantized_experts, kind)
    return make(**shape, dtype=torch.bfloat16, device="cuda", seed=seed)


def experts(
    kind: str, shape: dict[str, int], routing: Routing, tokens: Sequence[int]
) -> Iterator[tuple[int, Figures]]:
    """Times routing and experts of one layer; yields figures for each number of tokens."""
    num_experts, hidden, inner = (shape[name] for name in ("num_experts", "hidden", "inner"))
    bytes_each = 3 * hidden * inner * BYTES_PER_NUMBER[kind]
    flop_per_us = FLOP_PER_US * (2 if kind == "fp8" else 1)
    layers = [
        make_layer(kind, shape, seed) for seed in range(copies(int(bytes_each * num_experts), 3))
    ]

    def call(num_tokens: int, layer: ExpertWeights) -> torch.Tensor:
        logits, bias, x = inputs[num_tokens]
        return apply_experts(x, *route(logits, bias, routing), layer)

    forms = first_tokens_of_each_form(num_experts, routing.top_k, *FORMS.get(kind, ()))
    inputs = {
        num_tokens: (
            *make_logits(num_tokens, routing, num_experts=num_experts, device="cuda"),
            torch.randn(num_tokens, hidden, device="cuda").bfloat16(),
        )
        for num_tokens in {*forms, *tokens}
    }
    # Kernels are built at the same time; one after the other they take longer than all the rest.
    with ThreadPoolExecutor(len(forms)) as threads:
        list(threads.map(lambda num_tokens: call(num_tokens, layers[0]), forms))
    for num_tokens in tokens:
        logits, bias, _ = inputs[num_tokens]
        num_read = len(route(logits, bias, routing)[1].unique())
        flop = 6 * num_tokens * routing.top_k * hidden * inner
        calls = [partial(call, num_tokens, layer) for layer in layers]
        yield (
            num_tokens,
            {
                "us": microseconds(calls, 4),
                "floor_us": max(num_read * bytes_each / BYTES_PER_US, flop / flop_per_us),
            },
        )


def latent(
    sizes: dict[str, int],
    num_requests: int,
    num_queries: int,
    context: int,
    *,
    has_fp8_cache: bool,
) -> Figures:
    """Times latent attention of one layer."""
    cache_dtype = FP8_CACHE_DTYPE if has_fp8_cache else torch.bfloat16
    cached = num_requests * context * LatentCacheSpec(**sizes).bytes_per_token(cache_dtype)
    cases = [
        make_latent_case(
            [num_queries] * num_requests, [context] * num_requests, **sizes,
            dtype=torch.bfloat16, device="cuda", seed=seed, has_fp8_cache=has_fp8_cache,
        )
        for seed in range(copies(cached, 8))
    ]  # fmt: skip
    output = cases[0].queries.absorbed()[..., : sizes["latent_dim"]].contiguous()
    calls = [
        partial(
            latent_attention, case.queries.absorbed(), case.cache, case.metadata, output, case.scale
        )
        for case in cases
    ]
    seen = num_requests * num_queries * (context - (num_queries - 1) / 2)
    flop = 2 * seen * sizes["num_heads"] * (2 * sizes["latent_dim"] + sizes["rope_dim"])
    return {
        "us": microseconds(calls, 4),
        "floor_us": max(cached / BYTES_PER_US, flop / FLOP_PER_US),
    }


def jobs(only: set[str], tokens: Sequence[int]) -> Iterator[tuple[str, str, str, Figures]]:
    """Yields kernel, model, size, and their figures."""
    if "experts" in only:
        for model, case in MODELS.items():
            for num_tokens, figures in experts(*case, tokens):
                yield "experts", model, f"{num_tokens}", figures
            torch.cuda.empty_cache()
    if "latent" in only:
        for model, sizes in LATENT_SIZES.items():
            for step in LATENT_STEPS:
                size = " x ".join(map(str, step))
                yield "latent", model, size, latent(sizes, *step, has_fp8_cache=False)
                yield "latent8", model, size, latent(sizes, *step, has_fp8_cache=True)
                torch.cuda.empty_cache()


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="experts,latent")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    results = []
    for kernel, model, size, figures in jobs(set(arguments.only.split(",")), tokens):
        results.append({"kernel": kernel, "model": model, "size": size, **figures})
        ratio = figures["us"] / figures["floor_us"]
        print(
            f"{kernel:8} {model:18} {size:>14} {figures['us']:10.2f} us  "
            f"floor {figures['floor_us']:10.2f}  x{ratio:.2f}",
            flush=True,
        )
    if arguments.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
