"""Times the expert that all tokens share: after the others, on a second stream, as one of them.

    python -m tests.bench.shared_expert [--json out.json] [--tokens 1,8,32,128,2048]
        [--models glm-4.5-air,deepseek-v3-fp8]

All three ways compute a layer's routing, its routed experts and the shared one. One stream and two
are octavo::fused_moe_with_shared, held to one way for any number of tokens. One more routed expert
is a stack of E + 1 experts, of which every token also chooses the last one with a weight of 1; the
choice is made ahead, as the routing kernel would write that column at no cost. Weights are random;
method and ceilings are those of tests.bench.kernels. DeepSeek-V3 in bfloat16 takes 75 GB of GPU
memory while it is drawn; "of 8" is the share of one of 8 ranks.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from models.kernels.experts.moe import apply_experts, route
from models.operands.experts import ExpertWeights, Routing
from models.ops.experts import shared_expert
from services.engine.compilation.program import inserted_operators  # noqa: F401  # products of the layer
from tests.bench.experts import DEEPSEEK, DEEPSEEK_V3, make_layer
from tests.bench.kernels import copies, microseconds
from tests.support.moe_case import make_logits

GLM_4_5_AIR = {"num_experts": 128, "hidden": 4096, "inner": 1408}
GLM = Routing(top_k=8, is_sigmoid=True, is_normed=True, scaling=1.0, num_groups=1, top_groups=1)
OF_8 = DEEPSEEK_V3 | {"inner": 256}
MODELS = {
    "glm-4.5-air": ("bf16", GLM_4_5_AIR, GLM),
    "glm-4.5-air-fp8": ("fp8", GLM_4_5_AIR, GLM),
    "glm-4.5-air-fp8-rows": ("fp8-rows", GLM_4_5_AIR, GLM),
    "deepseek-v3-of-8": ("bf16", OF_8, DEEPSEEK),
    "deepseek-v3-fp8-of-8": ("fp8", OF_8, DEEPSEEK),
    "deepseek-v3-fp8": ("fp8", DEEPSEEK_V3, DEEPSEEK),
    "deepseek-v3": ("bf16", DEEPSEEK_V3, DEEPSEEK),
}
TOKENS = (1, 8, 32, 128, 2048)
ALWAYS, NEVER = 1 << 30, 0
"""Most tokens of two streams."""


def part(layer: ExpertWeights, experts: slice) -> ExpertWeights:
    """Returns some experts of a layer."""
    names = [
        each.name for each in fields(layer) if isinstance(getattr(layer, each.name), torch.Tensor)
    ]
    return replace(layer, **{name: getattr(layer, name)[experts] for name in names})


def on_streams(
    most_tokens: int,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    layer: ExpertWeights,
    routing: Routing,
) -> torch.Tensor:
    """Computes the layer's last expert apart; with up to `most_tokens` on a second stream."""
    routed, shared = part(layer, slice(-1)), part(layer, slice(-1, None))
    values = {
        "hidden": hidden,
        "router_logits": logits,
        "correction_bias": bias,
        **{each.name: getattr(routed, each.name) for each in fields(routed)},
        **{each.name: getattr(routing, each.name) for each in fields(routing)},
        "is_blocked": True,
    }
    for name in ("gate_up", "down", "gate_up_scale", "down_scale", "gate_up_bias", "down_bias"):
        value = getattr(shared, name)
        values[f"shared_{name}"] = None if value is None else value[0]
    arguments = torch.ops.octavo.fused_moe_with_shared.default._schema.arguments
    shared_expert.MOST_TOKENS = most_tokens
    return shared_expert.fused_moe_with_shared(*(values[each.name] for each in arguments))


def as_one_more(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    layer: ExpertWeights,
    routing: Routing,
    chosen: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Computes all experts in one stack; `chosen` are what `with_shared` returns."""
    route(logits, bias, routing)
    return apply_experts(hidden, *chosen, layer)


def with_shared(
    weights: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends the shared expert to each token's choice."""
    column = weights.new_ones(len(weights), 1)
    return torch.cat((weights, column), 1), torch.cat((ids, (column * num_experts).int()), 1)


def measure(
    kind: str, shape: dict[str, int], routing: Routing, tokens: list[int]
) -> Iterator[dict[str, float]]:
    """Yields the microseconds of each way for each number of tokens.

    Raises:
        AssertionError: their results differ by more than rounding.
    """
    num_experts = shape["num_experts"]
    # By row a product rounds a token with one scale, experts with one for each 128 features; a
    # product of one token rounds nothing.
    most_error = {"fp8-rows": 0.1, "fp8": 0.06}.get(kind, 0.03)
    bytes_each = 3 * shape["hidden"] * shape["inner"] * num_experts
    layers = [
        make_layer(kind, shape | {"num_experts": num_experts + 1}, seed)
        for seed in range(copies(bytes_each, 3))
    ]
    for num_tokens in tokens:
        logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
        hidden = torch.randn(num_tokens, shape["hidden"], device="cuda").bfloat16()
        chosen = with_shared(*route(logits, bias, routing), num_experts)
        inputs = (hidden, logits, bias)
        ways = {
            "one_stream": partial(on_streams, NEVER, *inputs, routing=routing),
            "two_streams": partial(on_streams, ALWAYS, *inputs, routing=routing),
            "one_more": partial(as_one_more, *inputs, routing=routing, chosen=chosen),
        }
        first, *others = (way(layer=layers[0]).double() for way in ways.values())
        for other in others:
            error = (first - other).norm() / first.norm()
            assert error < most_error, f"two ways differ by {float(error):.2g} of the norm"
        yield {
            "tokens": num_tokens,
            **{
                name: microseconds([partial(way, layer=layer) for layer in layers], 4)
                for name, way in ways.items()
            },
        }


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    results = []
    for model in arguments.models.split(","):
        for figures in measure(*MODELS[model], tokens):
            results.append({"model": model, **figures})
            print(
                f"{model:22} {figures['tokens']:6} tokens  "
                f"one stream {figures['one_stream']:9.2f} us  "
                f"two {figures['two_streams']:9.2f} us  "
                f"one more expert {figures['one_more']:9.2f} us",
                flush=True,
            )
        torch.cuda.empty_cache()
    if arguments.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
