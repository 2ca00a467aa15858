"""Decides which weights keep their stored format, before any of them is read."""

from collections.abc import Mapping

import torch

from models.layers.decoder import CausalLM
from models.layers.moe import Experts
from models.layers.quantization import QuantizableLinear, can_run_fp8, fits_fp8, use_fp8
from models.loading.checkpoint import CheckpointTensor
from models.loading.names import stored_modules
from models.loading.plan import BLOCKS, PLAIN_DTYPES, SCALE
from models.number_formats import FP8
from models.quantization.config import ROUNDING, QuantizationConfig, WeightScheme

Stored = Mapping[str, CheckpointTensor] | None
"""The checkpoint's tensors by their names in the model's family; None for dummy weights."""
STACKED_MXFP4 = "mxfp4"
"""quant_method of checkpoints that stack all experts of a layer."""


def can_keep(device: torch.device, dtype: torch.dtype, quantization: QuantizationConfig) -> bool:
    """Returns whether a device multiplies weights of a format, in a model of `dtype`."""
    if quantization.method == STACKED_MXFP4:
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
    formats = _StoredFormats(model, quantization, stored)
    for path, layer in model.stored_module.named_modules():
        if quantization.method == STACKED_MXFP4:
            if isinstance(layer, Experts) and layer.can_keep_mxfp4():
                names = [f"{path}.gate_up_proj", f"{path}.down_proj"]
                if formats.are_mxfp4(names):
                    layer.keep_mxfp4()
        elif isinstance(layer, QuantizableLinear):
            names = [f"{module}.weight" for module in stored_modules(model, path)]
            scheme = formats.fp8_scheme(names)
            if scheme is not None and fits_fp8(layer, scheme.block_size):
                use_fp8(layer, scheme.block_size)
        elif isinstance(layer, Experts):
            scheme = formats.fp8_scheme(_expert_names(path, model))
            if scheme is not None and layer.can_keep_fp8(scheme.block_size):
                layer.keep_fp8(scheme.block_size)


class _StoredFormats:
    """Formats of a checkpoint's tensors; without a checkpoint, the ones of its config."""

    def __init__(self, model: CausalLM, quantization: QuantizationConfig, stored: Stored) -> None:
        self._model = model
        self._quantization = quantization
        self._stored = stored

    def are_mxfp4(self, names: list[str]) -> bool:
        """Returns whether all these stacked experts are MXFP4."""
        if self._stored is None:
            modules = [name.rpartition(".")[0] for name in names]
            return not any(map(self._quantization.ignores, modules))
        return all(name + BLOCKS in self._stored for name in names)

    def fp8_scheme(self, names: list[str]) -> WeightScheme | None:
        """Returns how these weights are scaled, if all are FP8 with scales of one form."""
        schemes = {self._one_fp8_scheme(name) for name in names}
        return schemes.pop() if len({_blocks(scheme) for scheme in schemes}) == 1 else None

    def _one_fp8_scheme(self, name: str) -> WeightScheme | None:
        module = name.rpartition(".")[0]
        if self._stored is None:
            scheme = self._quantization.scheme_of(module)
            return scheme if scheme is not None and scheme.kind == "fp8" else None
        if name not in self._stored:
            return None
        values = self._stored[name].values
        if self._quantization.method == ROUNDING:
            is_rounded = values.dtype in PLAIN_DTYPES and values.dim() == 2
            return self._quantization.schemes[0] if is_rounded else None
        if values.dtype != FP8 or name + SCALE not in self._stored:
            return None
        return self._quantization.stored_scheme(module, "fp8")


def _blocks(scheme: WeightScheme | None) -> object:
    """Returns what two weights must have in common to be kept in one parameter."""
    return None if scheme is None else (scheme.kind, scheme.block_size)


def _expert_names(path: str, model: CausalLM) -> list[str]:
    """Returns the names of all tensors of a layer's experts; none if they are stored stacked."""
    parent, _, own_name = path.rpartition(".")
    return [
        f"{parent}.{each.checkpoint_name}"
        for each in model.expert_tensors
        if each.parameter.startswith(f"{own_name}.")
    ]
