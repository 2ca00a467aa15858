"""Tensors that stack all experts, for models whose checkpoints may also store each by itself."""

import re
from collections.abc import Iterator

from models.layers.decoder import CausalLM
from models.loading.checkpoint_tensor import CheckpointTensor

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale)?$")


def single_experts(
    name: str, tensor: CheckpointTensor, model: CausalLM
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yields a tensor of stacked experts as those of single ones, with names; others as they are.

    name: the tensor's in the model's family. Gates, [E, I, H], come before the up projections in
    the rows of a stack.
    """
    match = _STACKED.match(name)
    if match is None or model.expert_names is None or tensor.values.dim() != 3:
        yield name, tensor
        return
    path, kind, scale = match.groups()
    gate, up, down = model.expert_names
    names = [down] if kind == "down_proj" else [gate, up]
    for expert, matrix in enumerate(tensor.values):
        for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
            stored = f"{tensor.name}[{expert}]"
            own_name = f"{path}.{expert}.{part}.weight{scale or ''}"
            yield own_name, CheckpointTensor(tensor.file, stored, rows)
