"""Adapters of a small checkpoint for engines, and the tokens of their merged models."""

import copy

from tests.support.adapters import (
    expert_factors,
    linear_modules,
    merged_model,
    random_factors,
    write_adapter,
)
from tests.support.random_checkpoints import write_checkpoint
from tests.support.step_driver import greedy_continuation

PROMPTS = [
    [5, 17, 3],
    [40, 41, 42, 43, 44, 45, 46, 47, 48],
    [5, 17, 3, 8, 2, 7, 1],
    [5, 17, 3, 8, 2, 9],
]
NUM_TOKENS = 8
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "capture_while_serving": False,
}
SCARCE = {"num_kv_blocks": 10, "max_num_batched_tokens": 8}
"""9 blocks of 4 tokens are too few for four requests."""
UNSUPPORTED = ("kv_b_proj", "lm_head", ".gate", "router.proj", "shared_expert_gate")


class AdapterCase:
    """A checkpoint, some adapters of it, and the tokens of each."""

    def __init__(self, folder, family, *, num_adapters=2, with_experts=False, **sizes):
        self.folder = folder
        self.with_experts = with_experts
        self.base = folder / "base"
        self.model = write_checkpoint(self.base, family, **sizes)
        modules = {
            name: shape
            for name, shape in linear_modules(self.model, without=UNSUPPORTED).items()
            if ".experts." not in name
        }
        self.merged = {"": self.model}
        for number in range(num_adapters):
            factors = random_factors(modules, seed=number + 1, size=0.2)
            if with_experts:
                factors |= expert_factors(self.model, seed=number + 50, size=0.1)
            write_adapter(folder / "adapters" / f"a{number}", factors)
            self.merged[f"a{number}"] = merged_model(self.model, factors)

    @property
    def names(self):
        return [name for name in self.merged if name]

    def flags(self):
        names = [f"{name}={self.folder / 'adapters' / name}" for name in self.names]
        return {"lora": names, "lora_experts": self.with_experts}

    def expected(self, prompt, name, num_tokens=NUM_TOKENS):
        """Returns the tokens of an adapter's merged model; "" stands for the base."""
        return greedy_continuation(copy.deepcopy(self.merged[name]), prompt, num_tokens)
