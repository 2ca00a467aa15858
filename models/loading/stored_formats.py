"""Decides which weights keep their stored format, before any of them is read."""

from collections.abc import Mapping

import torch

from models.layers.decoder import CausalLM
from models.layers.experts import Experts
from models.layers.quantization import (
    FLOAT_GROUPS,
    Packing,
    QuantizableLinear,
    can_run_fp8,
    can_run_packed,
    fits_fp8,
    fits_packed,
    use_fp8,
    use_packed,
)
from models.loading.checkpoint import CheckpointTensor
from models.loading.fp8_weights import SCALE
from models.loading.kept_packed import KeptWeight
from models.loading.names import stored_modules
from models.loading.packed_weights import FIRST_PARTS, PackedWeight
from models.loading.plan import BLOCKS, PLAIN_DTYPES
from models.number_formats import FP8
from models.operands.packed_weights import RUN
from models.quantization.config import ROUNDING, QuantizationConfig, WeightKind, WeightScheme

Stored = Mapping[str, CheckpointTensor] | None
"""The checkpoint's tensors by their names in the model's family; None for dummy weights."""
STACKED_MXFP4 = "mxfp4"
"""quant_method of checkpoints that stack all experts of a layer."""


ALL_KINDS: frozenset[WeightKind] = frozenset(("fp8", "int4", "int8", "mxfp4", "nvfp4"))
"""Kinds of weights that some device keeps."""


def kept_kinds(
    device: torch.device, dtype: torch.dtype, quantization: QuantizationConfig
) -> frozenset[WeightKind]:
    """Returns the kinds of weights that a device multiplies as they are, in a model of `dtype`."""
    if quantization.method == STACKED_MXFP4:
        # float16 cannot represent every scale.
        is_able = device.type == "cuda" and dtype != torch.float16
        return frozenset(("mxfp4",)) if is_able else frozenset()
    if can_run_packed(device, dtype):
        return ALL_KINDS
    return frozenset(("fp8",)) if can_run_fp8(device) else frozenset()


def needs_bfloat16(
    device: torch.device, dtype: torch.dtype, quantization: QuantizationConfig
) -> bool:
    """Returns whether a device keeps packed weights in bfloat16 models and not in `dtype`."""
    if not can_run_packed(device, torch.bfloat16):
        return False
    in_bfloat16, kept = (kept_kinds(device, each, quantization) for each in (torch.bfloat16, dtype))
    # Products take groups of whole runs.
    return any(
        scheme.kind in in_bfloat16 - kept
        and (scheme.kind not in ("int4", "int8") or not (scheme.group_size or RUN) % RUN)
        for scheme in quantization.schemes
    )


def keep_stored_formats(
    model: CausalLM,
    stored: Stored,
    packed: Mapping[str, PackedWeight],
    kinds: frozenset[WeightKind] = ALL_KINDS,
) -> None:
    """Makes the model's weights of some kinds keep their stored format, where products take it.

    The model has no values yet. Without a checkpoint, all weights that its config does not exclude
    count as stored so. packed: of find_packed.
    """
    quantization = model.config.quantization
    assert quantization is not None, "the caller checked"
    formats = _StoredFormats(quantization, stored, packed, kinds)
    is_stacked = quantization.method == STACKED_MXFP4
    for path, layer in model.stored_module.named_modules():
        if isinstance(layer, Experts) and is_stacked:
            names = [f"{path}.gate_up_proj", f"{path}.down_proj"]
            if "mxfp4" in kinds and layer.can_keep_mxfp4() and formats.are_mxfp4(names):
                layer.keep_mxfp4()
        elif isinstance(layer, Experts):
            _keep_experts(layer, formats, _expert_modules(path, model))
        elif isinstance(layer, QuantizableLinear) and not is_stacked:
            _keep_linear(layer, formats, stored_modules(model, path))


def _keep_experts(layer: Experts, formats: "_StoredFormats", modules: list[str]) -> None:
    scheme, packing = formats.fp8_scheme(modules), formats.packing(modules)
    if scheme is not None and layer.can_keep_fp8(scheme.block_size):
        layer.keep_fp8(scheme.block_size)
    elif packing is not None and layer.can_keep_packed(packing):
        layer.keep_packed(packing)


def _keep_linear(layer: QuantizableLinear, formats: "_StoredFormats", modules: list[str]) -> None:
    scheme, packing = formats.fp8_scheme(modules), formats.packing(modules)
    if scheme is not None and fits_fp8(layer, scheme.block_size):
        use_fp8(layer, scheme.block_size)
    elif packing is not None and fits_packed(layer, packing):
        use_packed(layer, packing)


class _StoredFormats:
    """Formats of a checkpoint's tensors; without a checkpoint, the ones of its config."""

    def __init__(
        self,
        quantization: QuantizationConfig,
        stored: Stored,
        packed: Mapping[str, PackedWeight],
        kinds: frozenset[WeightKind],
    ) -> None:
        self._quantization = quantization
        self._stored = stored
        self._packed = packed
        self._kinds = kinds

    def are_mxfp4(self, names: list[str]) -> bool:
        """Returns whether all these stacked experts are MXFP4."""
        if self._stored is None:
            modules = [name.rpartition(".")[0] for name in names]
            return not any(map(self._quantization.ignores, modules))
        return all(name + BLOCKS in self._stored for name in names)

    def fp8_scheme(self, modules: list[str]) -> WeightScheme | None:
        """Returns how these modules' weights are scaled, if all are FP8 with scales of one form."""
        if "fp8" not in self._kinds:
            return None
        schemes = {self._one_fp8_scheme(module) for module in modules}
        return schemes.pop() if len({_blocks(scheme) for scheme in schemes}) == 1 else None

    def packing(self, modules: list[str]) -> Packing | None:
        """Returns how a layer keeps these modules packed, if all are stored in one form."""
        if self._stored is None:
            packings = {self._made_up_packing(module) for module in modules}
            packing = packings.pop() if len(packings) == 1 else None
        else:
            found = [self._kept(module) for module in modules]
            first = found[0] if found else None
            is_one_form = first is not None and all(
                each is not None and first.shares_layer(each) for each in found
            )
            packing = first.packing if first is not None and is_one_form else None
        return packing if packing is not None and packing.kind in self._kinds else None

    def _kept(self, module: str) -> KeptWeight | None:
        names = (f"{module}.{part}" for part in FIRST_PARTS)
        return next((self._packed[name].kept for name in names if name in self._packed), None)

    def _made_up_packing(self, module: str) -> Packing | None:
        """Returns how a module of dummy weights is packed; its columns are in order."""
        scheme = self._quantization.scheme_of(module)
        match None if scheme is None else scheme.kind:
            case ("int4" | "int8") as kind:
                assert scheme is not None, "it has a kind"
                has_zeros = not scheme.is_symmetric
                return Packing(kind=kind, group=scheme.group_size, has_zeros=has_zeros)
            case ("mxfp4" | "nvfp4") as kind:
                return Packing(kind=kind, group=FLOAT_GROUPS[kind])
            case _:
                return None

    def _one_fp8_scheme(self, module: str) -> WeightScheme | None:
        if self._stored is None:
            scheme = self._quantization.scheme_of(module)
            return scheme if scheme is not None and scheme.kind == "fp8" else None
        name = f"{module}.weight"
        if name not in self._stored:
            return None
        tensor = self._stored[name]
        values = tensor.values
        if self._quantization.method == ROUNDING:
            is_plain = values.dtype in PLAIN_DTYPES or tensor.code is not None
            is_rounded = is_plain and values.dim() == 2
            return self._quantization.schemes[0] if is_rounded else None
        if values.dtype != FP8 or name + SCALE not in self._stored:
            return None
        # None: kernels and collectives are prepared for what config.json describes, so a weight
        # that it does not is dequantised.
        return self._quantization.stored_scheme(tensor.module, "fp8")


def _blocks(scheme: WeightScheme | None) -> object:
    """Returns what two weights must have in common to be kept in one parameter."""
    return None if scheme is None else (scheme.kind, scheme.block_size)


def _expert_modules(path: str, model: CausalLM) -> list[str]:
    """Returns the checkpoint's modules of a layer's experts; none if they are stored stacked."""
    parent, _, own_name = path.rpartition(".")
    return [
        f"{parent}.{each.checkpoint_name.removesuffix('.weight')}"
        for each in model.expert_tensors
        if each.parameter.startswith(f"{own_name}.")
    ]
