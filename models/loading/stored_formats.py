"""Decides which weights keep their stored format, before any of them is read."""

from collections.abc import Callable, Mapping

import torch

from models.layers.decoder import CausalLM
from models.layers.moe import Experts
from models.layers.quantization import QuantizableLinear, can_run_fp8, fits_fp8, use_fp8
from models.loading.checkpoint import CheckpointTensor
from models.loading.names import stored_modules
from models.loading.plan import BLOCKS, SCALE
from models.number_formats import FP8
from models.quantization_config import QuantizationConfig

Stored = Mapping[str, CheckpointTensor] | None
"""The checkpoint's tensors by their names in the model's family; None for dummy weights."""


def can_keep(device: torch.device, dtype: torch.dtype, quantization: QuantizationConfig) -> bool:
    """Returns whether a device multiplies weights of a format, in a model of `dtype`."""
    if quantization.method == "mxfp4":
        # float16 cannot represent every scale.
        return device.type == "cuda" and dtype != torch.float16
    return can_run_fp8(device)


def keep_stored_formats(model: CausalLM, stored: Stored) -> None:
    """Makes the model's weights keep their stored format, where there are products for it.

    The model has no values yet. Without a checkpoint, all weights that its config does not exclude
    count as stored so.
    """
    quantization = model.config.quantization
    assert quantization is not None, "the caller checked"
    for path, layer in model.stored_module.named_modules():
        if quantization.method == "mxfp4":
            if isinstance(layer, Experts) and layer.can_keep_mxfp4():
                names = [f"{path}.gate_up_proj", f"{path}.down_proj"]
                if _are_kept(names, model, stored, _is_mxfp4):
                    layer.keep_mxfp4()
        elif isinstance(layer, QuantizableLinear):
            names = [f"{module}.weight" for module in stored_modules(model, path)]
            if fits_fp8(layer, quantization.block_size) and _are_kept(
                names, model, stored, _is_fp8
            ):
                use_fp8(layer, quantization.block_size)
        elif isinstance(layer, Experts) and layer.can_keep_fp8(quantization.block_size):
            names = _expert_names(path, model)
            if names and _are_kept(names, model, stored, _is_fp8):
                layer.keep_fp8(quantization.block_size)


def _are_kept(
    names: list[str],
    model: CausalLM,
    stored: Stored,
    is_stored_so: Callable[[str, Mapping[str, CheckpointTensor]], bool],
) -> bool:
    """Returns whether all these tensors are stored in a format, or would be."""
    quantization = model.config.quantization
    assert quantization is not None, "the caller checked"
    if stored is None:
        return not any(quantization.ignores(name.rpartition(".")[0]) for name in names)
    return all(is_stored_so(name, stored) for name in names)


def _is_fp8(name: str, stored: Mapping[str, CheckpointTensor]) -> bool:
    return name in stored and stored[name].values.dtype == FP8 and name + SCALE in stored


def _is_mxfp4(name: str, stored: Mapping[str, CheckpointTensor]) -> bool:
    return name + BLOCKS in stored


def _expert_names(path: str, model: CausalLM) -> list[str]:
    """Returns the names of all tensors of a layer's experts; none if they are stored stacked."""
    parent, _, own_name = path.rpartition(".")
    return [
        f"{parent}.{each.checkpoint_name}"
        for each in model.expert_tensors
        if each.parameter.startswith(f"{own_name}.")
    ]
