"""Builds the arguments of the sampler from one dictionary per row."""

from collections.abc import Sequence

import torch

from models.ops.sampling.sample_tokens import kept_weights
from services.engine.sampling.sampler import TokenChoice

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}


def token_choice(rows: Sequence[dict[str, float]], *, device: str = "cpu") -> TokenChoice:
    """Returns the parameters of rows given by their values that are not neutral."""
    full = [DEFAULTS | row for row in rows]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in full], dtype=dtype, device=device)

    return TokenChoice(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seeds=column("seed", torch.int64),
        positions=column("position", torch.int32),
    )


def probabilities(logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
    """Returns the distribution [S, V] float32 that `sample` draws from where it is not greedy."""
    weights = kept_weights(logits, choice.temperature, choice.top_k, choice.top_p, choice.min_p)
    return (weights.double() / weights.sum(dim=-1, keepdim=True)).float()
