"""Times experts and latent attention against what the memory or the arithmetic allows.

    python -m tests.bench.experts [--json out.json] [--only experts,latent]

Weights are random bfloat16 and experts are chosen by random logits, so that tokens spread evenly.
The floor of experts is reading those chosen once, or their products; that of latent attention is
reading the cache once, or the products with it. Ceilings and method are those of
tests.bench.kernels.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from models.ops.experts import Routing
from models.ops.triton.latent_attention import latent_attention
from models.ops.triton.moe import apply_experts, route
from tests.bench.kernels import BYTES_PER_US, FLOP_PER_US, copies, microseconds
from tests.support.latent_case import make_latent_case
from tests.support.moe_case import make_experts, make_logits


def softmax(top_k: int) -> Routing:
    """Returns the plain routing."""
    return Routing(
        top_k=top_k, is_sigmoid=False, is_normed=True, scaling=1.0, num_groups=1, top_groups=1
    )


DEEPSEEK = Routing(
    top_k=8, is_sigmoid=True, is_normed=True, scaling=2.5, num_groups=8, top_groups=4
)
MODELS = {
    "Qwen3-30B-A3B": ({"num_experts": 128, "hidden": 2048, "inner": 768}, softmax(8)),
    "gpt-oss-20b": (
        {"num_experts": 32, "hidden": 2880, "inner": 2880, "is_clamped": True},
        softmax(4),
    ),
    "GLM-4.5-Air": ({"num_experts": 128, "hidden": 4096, "inner": 1408}, softmax(8)),
    "Mixtral-8x7B": ({"num_experts": 8, "hidden": 4096, "inner": 14336}, softmax(2)),
    "DeepSeek-V3": ({"num_experts": 256, "hidden": 7168, "inner": 2048}, DEEPSEEK),
}
TOKENS = (1, 2, 4, 8, 16, 32, 128, 256, 2048, 8192)
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


def experts(shape: dict[str, int], routing: Routing, num_tokens: int) -> Figures:
    """Times routing and experts of one layer."""
    num_experts, hidden, inner = (shape[name] for name in ("num_experts", "hidden", "inner"))
    bytes_each = 3 * hidden * inner * 2
    layers = [
        make_experts(**shape, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed in range(copies(bytes_each * num_experts, 3))
    ]
    logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()

    def call(layer):
        weights, ids = route(logits, bias, routing)
        return apply_experts(x, weights, ids, layer)

    num_read = len(route(logits, bias, routing)[1].unique())
    flop = 6 * num_tokens * routing.top_k * hidden * inner
    return {
        "us": microseconds([lambda layer=layer: call(layer) for layer in layers], 4),
        "floor_us": max(num_read * bytes_each / BYTES_PER_US, flop / FLOP_PER_US),
    }


def latent(sizes: dict[str, int], num_requests: int, num_queries: int, context: int) -> Figures:
    """Times latent attention of one layer."""
    cached = num_requests * context * (sizes["latent_dim"] + sizes["rope_dim"]) * 2
    cases = [
        make_latent_case(
            [num_queries] * num_requests, [context] * num_requests, **sizes,
            dtype=torch.bfloat16, device="cuda", seed=seed,
        )
        for seed in range(copies(cached, 8))
    ]  # fmt: skip
    output = cases[0].run()
    calls = [
        lambda case=case: latent_attention(case.q, case.cache, case.metadata, output, case.scale)
        for case in cases
    ]
    seen = num_requests * num_queries * (context - (num_queries - 1) / 2)
    flop = 2 * seen * sizes["num_heads"] * (2 * sizes["latent_dim"] + sizes["rope_dim"])
    return {
        "us": microseconds(calls, 4),
        "floor_us": max(cached / BYTES_PER_US, flop / FLOP_PER_US),
    }


def jobs(only: set[str]) -> Iterator[tuple[str, str, str, Callable[[], Figures]]]:
    """Yields kernel, model, size, and what times them."""
    if "experts" in only:
        for model, (shape, routing) in MODELS.items():
            for num_tokens in TOKENS:
                yield (
                    "experts",
                    model,
                    f"{num_tokens}",
                    partial(experts, shape, routing, num_tokens),
                )
    if "latent" in only:
        for model, sizes in LATENT_SIZES.items():
            for step in LATENT_STEPS:
                size = " x ".join(map(str, step))
                yield "latent", model, size, partial(latent, sizes, *step)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="experts,latent")
    arguments = parser.parse_args()
    results = []
    for kernel, model, size, timed in jobs(set(arguments.only.split(","))):
        figures = timed()
        torch.cuda.empty_cache()
        results.append({"kernel": kernel, "model": model, "size": size, **figures})
        ratio = figures["us"] / figures["floor_us"]
        print(
            f"{kernel:8} {model:16} {size:>16} {figures['us']:10.2f} us  "
            f"floor {figures['floor_us']:10.2f}  x{ratio:.2f}",
            flush=True,
        )
    if arguments.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
