"""Times the expert that all tokens share on a second stream against one more routed expert.

    python -m tests.bench.shared_expert [--json out.json] [--tokens 1,8,32,128,512]

Both compute a layer's routing, its routed experts and the shared one. The second stream is
octavo::fused_moe_with_shared. One more routed expert is a stack of E + 1 experts, of which every
token also chooses the last one with a weight of 1; the choice is made ahead, as the routing kernel
would write that column at no cost. Weights are random; method and ceilings are those of
tests.bench.kernels.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from models.ops.moe.shared_expert import fused_moe_with_shared
from models.ops.operands.experts import ExpertWeights, Routing
from models.ops.triton.moe.moe import apply_experts, route
from services.engine.compilation import inserted_operators  # noqa: F401  # products of the layer
from tests.bench.experts import DEEPSEEK, DEEPSEEK_V3, make_layer, softmax
from tests.bench.kernels import copies, microseconds
from tests.support.moe_case import make_logits

MODELS = {
    "GLM-4.5-Air": ("bf16", {"num_experts": 128, "hidden": 4096, "inner": 1408}, softmax(8)),
    "DeepSeek-V3 fp8": ("fp8", DEEPSEEK_V3, DEEPSEEK),
    "DeepSeek-V3 fp8 of 8": ("fp8", DEEPSEEK_V3 | {"inner": 256}, DEEPSEEK),
}
TOKENS = (1, 4, 8, 32, 128, 512, 2048)


def part(layer: ExpertWeights, experts: slice) -> ExpertWeights:
    """Returns some experts of a layer."""
    names = [
        each.name for each in fields(layer) if isinstance(getattr(layer, each.name), torch.Tensor)
    ]
    return replace(layer, **{name: getattr(layer, name)[experts] for name in names})


def on_two_streams(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    layer: ExpertWeights,
    routing: Routing,
) -> torch.Tensor:
    """Computes the layer's last expert beside the others."""
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
    return fused_moe_with_shared(*(values[argument.name] for argument in arguments))


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
    """Yields the microseconds of both ways for each number of tokens.

    Raises:
        AssertionError: their results differ by more than rounding.
    """
    num_experts = shape["num_experts"]
    bytes_each = 3 * shape["hidden"] * shape["inner"] * num_experts
    layers = [
        make_layer(kind, shape | {"num_experts": num_experts + 1}, seed)
        for seed in range(copies(bytes_each, 3))
    ]
    for num_tokens in tokens:
        logits, bias = make_logits(num_tokens, routing, num_experts=num_experts, device="cuda")
        hidden = torch.randn(num_tokens, shape["hidden"], device="cuda").bfloat16()
        chosen = with_shared(*route(logits, bias, routing), num_experts)
        ways = {
            "two_streams": partial(on_two_streams, hidden, logits, bias, routing=routing),
            "one_more": partial(as_one_more, hidden, logits, bias, routing=routing, chosen=chosen),
        }
        results = [way(layer=layers[0]).double() for way in ways.values()]
        error = (results[0] - results[1]).norm() / results[0].norm()
        assert error < 0.03, f"the two differ by {float(error):.2g} of the norm"
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
    arguments = parser.parse_args()
    tokens = [int(count) for count in arguments.tokens.split(",")]
    results = []
    for model, case in MODELS.items():
        for figures in measure(*case, tokens):
            results.append({"model": model, **figures})
            ratio = figures["two_streams"] / figures["one_more"]
            print(
                f"{model:22} {figures['tokens']:6} tokens  "
                f"two streams {figures['two_streams']:9.2f} us  "
                f"one more expert {figures['one_more']:9.2f} us  x{ratio:.2f}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if arguments.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**record, "results": results}, indent=1))


if __name__ == "__main__":
    main()
