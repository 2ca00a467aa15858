"""The stored tensors of a model's family, by name; stacks and merged matrices as single ones."""

import re
from collections.abc import Collection, Iterator, Sequence

from models.layers.decoder import CausalLM
from models.loading.checkpoint_tensor import CheckpointError, CheckpointTensor
from models.loading.names import is_of_loaded_part, merged_parts, renamed

_DECODER, _BARE_EMBEDDING = "model.", "embed_tokens.weight"
"""transformers stores decoders without a head without the prefix."""
_HEADS = ("lm_head.", "score.")
_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale)?$")


def by_model_name(
    tensors: Sequence[CheckpointTensor], model: CausalLM
) -> dict[str, CheckpointTensor]:
    """Returns the stored tensors by their names in the model's family.

    Parts that the model does without are left out, whatever their format.

    Raises:
        CheckpointError: two tensors have the same one.
    """
    named: dict[str, CheckpointTensor] = {}
    single_names = {each.checkpoint_name for each in model.expert_tensors}
    prefix = _DECODER if any(tensor.name == _BARE_EMBEDDING for tensor in tensors) else ""
    for tensor in tensors:
        if model.config.lacks_head and tensor.name.startswith(_HEADS):
            continue
        name = renamed(prefix + tensor.name, model)
        if model.config.is_text_part and not is_of_loaded_part(name, model):
            continue
        parts = _gate_and_up(name, tensor, model) or (
            _single_experts(name, tensor, model, single_names)
        )
        for own_name, each in parts:
            if own_name in named:
                other = named[own_name]
                raise CheckpointError(
                    f"{each.file}: tensor {each.name} is {other.name} of {other.file}"
                )
            named[own_name] = each
    return named


def _gate_and_up(
    name: str, tensor: CheckpointTensor, model: CausalLM
) -> list[tuple[str, CheckpointTensor]]:
    """Returns both halves of a merged matrix, with names; none of any other tensor."""
    if tensor.code is not None or tensor.values.dim() != 2:
        return []
    return [
        (part, CheckpointTensor(tensor.file, f"{tensor.name}[{number}]", rows))
        for number, (part, rows) in enumerate(
            zip(merged_parts(name, model), tensor.values.tensor_split(2), strict=False)
        )
    ]


def _single_experts(
    name: str, tensor: CheckpointTensor, model: CausalLM, single_names: Collection[str]
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Yields a tensor of stacked experts as those of single ones, with names; others as they are.

    name: the tensor's in the model's family. single_names: of the tensors of single experts that
    the model takes. Gates, [E, I, H], come before the up projections in the rows of a stack.
    """
    match = _STACKED.match(name)
    if match is None or model.expert_names is None or tensor.values.dim() != 3:
        yield name, tensor
        return
    path, kind, scale = match.groups()
    gate, up, down = model.expert_names
    names = [down] if kind == "down_proj" else [gate, up]
    if f"experts.0.{names[0]}.weight" not in single_names:
        yield name, tensor
        return
    stack = tensor.values
    # Scales of rows that come as columns stay as they are.
    if model.transposes_stacked_experts and stack.shape[2] > 1:
        stack = stack.transpose(1, 2)
    for expert, matrix in enumerate(stack):
        for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
            stored = f"{tensor.name}[{expert}]"
            own_name = f"{path}.{expert}.{part}.weight{scale or ''}"
            yield own_name, CheckpointTensor(tensor.file, stored, rows)
