"""Compares a model without memory with the checkpoint that will fill it."""

from collections.abc import Sequence

import torch

from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError
from models.loading.plan import Load

MAX_GROWTH = 13
"""Most bytes per stored byte: the 2.6 bits of GGUF's Q2_K that become float32."""


def check_fit(loads: Sequence[Load], model: CausalLM) -> None:
    """Checks the shapes of weights before any of them is allocated or read.

    loads are from `plan_loads` for the model, whose parameters are on torch's "meta" device.

    Raises:
        CheckpointError: a stored tensor has another shape than its parameter, or the parameters
            take more memory than the checkpoint can fill.
    """
    for load in loads:
        destination = load.destination
        try:
            destination.layer.weight_loader(
                destination.param,
                torch.empty(load.shape, dtype=destination.param.dtype, device="meta"),
                destination.shard_id,
            )
        except ValueError as error:
            tensor = load.tensor
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
    needed = _num_bytes(model)
    stored = sum(part.nbytes for load in loads for part in load.parts)
    if needed > MAX_GROWTH * stored:
        raise CheckpointError(
            f"{loads[0].tensor.file.parent}: the model that config.json describes takes {needed} "
            f"bytes; the {stored} bytes of the checkpoint cannot fill it"
        )


def check_room(model: CausalLM, device: torch.device) -> None:
    """Checks that a GPU has room for a model, or this rank's share of one, before it is loaded.

    Raises:
        CheckpointError: its free memory is less than the weights.
    """
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = _num_bytes(model)
    if needed > free:
        raise CheckpointError(
            f"the weights take {needed / 2**30:.1f} GiB of {device}, which has "
            f"{free / 2**30:.1f} GiB free. Share the model with more GPUs by --tensor-parallel-size"
        )


def _num_bytes(model: CausalLM) -> int:
    return sum(param.numel() * param.element_size() for param in set(model.parameters()))
