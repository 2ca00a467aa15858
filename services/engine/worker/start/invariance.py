"""Refuses --batch-invariant for models whose rows would depend on the batch."""

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.moe import Experts
from models.ops.triton.moe.expert_forms import takes_cores


def check_batch_invariance(model: ModelConfig, *, num_ranks: int, moves_experts: bool) -> None:
    """Refuses a family or a setting that the mode does not cover.

    Raises:
        ValueError: it names the family or the flag, and what depends on the batch.
    """
    if moves_experts:
        raise ValueError(
            "--batch-invariant does not cover --eplb-interval: experts that move between ranks "
            "change the order of a token's sum"
        )
    name = model.architecture
    if model.transformers is not None:
        raise ValueError(
            f"--batch-invariant covers none of transformers' modules, which run {name}: their "
            "operations choose their order by the size of the batch"
        )
    if model.mla is not None and model.mla.index is not None:
        raise ValueError(
            f"--batch-invariant does not cover attention that chooses its tokens, which {name} "
            "has: scores that choose them depend on the batch"
        )
    if num_ranks > 1 and model.architecture == "Olmo2ForCausalLM":
        raise ValueError(
            f"--batch-invariant does not cover {name} with --tensor-parallel-size {num_ranks}: its "
            "norms sum over the ranks in an order that depends on the batch"
        )


def check_invariant_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a format of weights that the mode does not cover.

    Raises:
        ValueError: it names the format.
    """
    for module in model.modules():
        if not isinstance(module, Experts) or module.gate_up_proj.dtype is not torch.uint8:
            continue
        device = module.gate_up_proj.device
        if device.type != "cpu" and not takes_cores(dtype, device):
            raise ValueError(
                "--batch-invariant covers experts whose weights stay packed in 4 bits on a Hopper "
                f"GPU in bfloat16, not {device} in {str(dtype).removeprefix('torch.')}: other "
                "kernels choose their tiles by the number of tokens"
            )
