"""Decides how each stored tensor is loaded, before any of them is read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from models.layers.decoder import CausalLM
from models.layers.experts import Experts
from models.layers.quantization import QuantizableLinear
from models.layers.weight import LoadsWeights
from models.loading.cache_scales import check_cache_scale, is_cache_scale
from models.loading.checkpoint import CheckpointError, CheckpointTensor
from models.loading.dequantize import (
    check_mxfp4,
    dequantize_fp8,
    dequantize_mxfp4,
    normalized_scale,
    rounded_to_fp8,
)
from models.loading.fp8_weights import SCALE, fp8_scheme
from models.loading.gguf_joined import Code, rounded_code
from models.loading.kept_packed import KeepsBits, KeptPart, KeptWeight
from models.loading.names import (
    Destination,
    find_destinations,
    is_of_another_stage,
    is_past_the_last_layer,
    torn,
)
from models.loading.packed_weights import FIRST_PARTS, OTHER_PARTS, PackedWeight, packed_module
from models.loading.rounding import RoundsToFP8, is_rounded
from models.number_formats import E8M0, FP8, MXFP4, MXFP4_RUN
from models.quantization.config import ROUNDING, WeightScheme

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale")
"""Names of scales of activations beside FP8 weights: the common one, of transformers, and of
AutoFP8's first releases."""
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Load:
    """Stored tensors that together fill one part of the model."""

    tensor: CheckpointTensor
    """The tensor that messages name."""
    parts: tuple[torch.Tensor, ...]
    """Inputs of `decode`, as stored: memory-mapped, on the CPU."""
    decode: Callable[..., torch.Tensor]
    """Computes the values from the parts, on any device."""
    destination: Destination
    shape: tuple[int, ...]
    """Of the decoded values, in elements of the parameter."""
    stored_as: str
    """The stored format, in words."""

    @property
    def is_view(self) -> bool:
        """Whether `decode` reads nothing: its result shows the file's own bytes."""
        return self.decode in (as_it_is, _rows_of_blocks)

    def of_this_rank(self) -> Iterator["Load"]:
        """Yields the loads that fill this rank's parameters: one for each expert of stacked ones.

        A rank that holds whole experts then reads and decodes only those.
        """
        destination = self.destination
        layer, shard_id = destination.layer, destination.shard_id
        layer = layer.layer if isinstance(layer, RoundsToFP8 | KeepsBits) else layer
        if not isinstance(layer, Experts) or layer.placement is None:
            yield self
            return
        expert, part = shard_id if isinstance(shard_id, tuple) else (None, 0)
        if expert is not None:
            if layer.slot_of(expert) is not None:
                yield self
            return
        for each in layer.placement.experts_of(layer.ranks.rank):
            yield replace(
                self,
                parts=tuple(values[each : each + 1] for values in self.parts),
                shape=(1, *self.shape[1:]),
                destination=replace(destination, shard_id=(each, part)),
            )

    def into(self, params: Mapping[nn.Parameter, nn.Parameter]) -> "Load":
        """Returns the same load into the parameter that replaces its own."""
        param = params[self.destination.param]
        return replace(self, destination=replace(self.destination, param=param))


class MissingTensorsError(CheckpointError):
    """A checkpoint lacks tensors of the model."""


def plan_loads(
    stored: Mapping[str, CheckpointTensor],
    packed: Mapping[str, PackedWeight],
    model: CausalLM,
    dtype: torch.dtype,
    *,
    is_part: bool = False,
) -> list[Load]:
    """Returns the loads, in stored order.

    Weights stay FP8 if their parameters are; others are dequantised to `dtype` on the way.

    Args:
        stored: the tensors by their names in the model's family.
        packed: of find_packed.
        model: has the parameters.
        dtype: of its activations.
        is_part: whether tensors may be missing, but for scales of weights that are there.

    Raises:
        MissingTensorsError: a tensor is missing.
        CheckpointError: a tensor is unknown, of an unreadable dtype, or without its scale.
    """
    return _Plan(stored, packed, model, dtype, is_part=is_part).loads()


class _Plan:
    """The rules of `plan_loads`."""

    def __init__(
        self,
        stored: Mapping[str, CheckpointTensor],
        packed: Mapping[str, PackedWeight],
        model: CausalLM,
        dtype: torch.dtype,
        *,
        is_part: bool,
    ) -> None:
        self._is_part = is_part
        self._stored = stored
        self._packed = packed
        self._model = model
        self._dtype = dtype
        self._quantization = model.config.quantization
        self._destinations = find_destinations(model)
        self._is_rounding = self._quantization is not None and self._quantization.method == ROUNDING

    def loads(self) -> list[Load]:
        self._check_tied_head()
        missing = set(self._destinations)
        loads: list[Load] = []
        for name, tensor in self._stored.items():
            target = self._target(name)
            if target is None:
                self._check_superfluous(name, tensor)
                continue
            kept = self._kept_loads(name, tensor, target)
            if kept:
                loads += kept.values()
                missing -= kept.keys()
                continue
            try:
                loads.append(self._load(name, tensor, self._destinations[target]))
            except ValueError as error:
                raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
            missing.discard(target)
            if isinstance(loads[-1].destination.layer, RoundsToFP8):
                missing.discard(target + SCALE)
        if self._is_part:
            missing = torn(missing, self._destinations)
        if missing:
            raise MissingTensorsError(
                f"{self._where()}: {len(missing)} tensors are missing, the first is {min(missing)}"
            )
        return loads

    def _target(self, name: str) -> str | None:
        """Returns which of the model's tensors a stored one fills."""
        if name in self._packed:
            name = f"{packed_module(name)[0]}.weight"
        elif self._is_beside_packed_values(name):
            return None
        if name in self._destinations:
            return name
        base = name.removesuffix(BLOCKS)
        if self._is_mxfp4(base):
            return base
        is_kept = name.endswith(SCALES) and self._is_mxfp4(name.removesuffix(SCALES))
        scale = name.removesuffix(SCALES) + SCALE
        return scale if is_kept and scale in self._destinations else None

    def _kept_loads(self, name: str, tensor: CheckpointTensor, target: str) -> dict[str, Load]:
        """Returns the loads of a packed weight, by the model's names; none if it is not kept."""
        packed = self._packed.get(name)
        if packed is None or packed.kept is None:
            return {}
        loads = {}
        for part, values in _kept_params(self._destinations[target].layer, packed.kept).items():
            own_name = f"{packed_module(target)[0]}.{part}"
            destination = self._destinations[own_name]
            if not destination.param.dtype.is_floating_point:
                destination = replace(destination, layer=KeepsBits(destination.layer))
            loads[own_name] = Load(
                tensor, values.parts, values.decode, destination, values.shape,
                packed.scheme.describe(),
            )  # fmt: skip
        return loads

    def _is_mxfp4(self, base: str) -> bool:
        return base in self._destinations and base + BLOCKS in self._stored

    def _load(self, name: str, tensor: CheckpointTensor, destination: Destination) -> Load:
        """Returns how one stored tensor, with those beside it, fills its destination.

        Raises:
            ValueError: it cannot.
        """
        packed = self._packed.get(name)
        if packed is not None:
            stored_as = packed.scheme.describe()
            return Load(tensor, packed.parts, packed.decode, destination, packed.shape, stored_as)
        if tensor.code is not None:
            return self._coded_load(tensor, tensor.code, destination)
        values = tensor.values
        shape, stored_as = tuple(values.shape), _name(values)
        if self._is_rounding and values.dtype in PLAIN_DTYPES and is_rounded(destination, values):
            rounds: Callable[..., torch.Tensor] = partial(rounded_to_fp8, dtype=self._dtype)
            if destination.param.dtype == FP8:
                rounds = as_it_is
                destination = replace(destination, layer=RoundsToFP8(destination.layer))
            return Load(tensor, (values,), rounds, destination, shape, stored_as)
        if values.dtype == FP8:
            stored_as = self._fp8_scheme(name).describe()
        elif name.endswith(BLOCKS) and name not in self._destinations:
            stored_as = "mxfp4"
            if destination.param.dtype != MXFP4 and values.dim() == 4:
                shape = values.shape[0], MXFP4_RUN * values.shape[2], values.shape[1]
            elif values.dim() == 4:
                shape = tuple(_rows_of_blocks(values.to("meta")).shape)
        parts, decode = self._source(name, values, destination.param)
        if decode is as_it_is:
            shape = tuple(parts[0].shape)
        return Load(tensor, parts, decode, destination, shape, stored_as)

    def _coded_load(self, tensor: CheckpointTensor, code: Code, to: Destination) -> Load:
        dtype = torch.float32 if to.param.dtype == FP8 else to.param.dtype
        decode = partial(code.decode, dtype=dtype)
        if self._is_rounding and is_rounded(to, tensor.values):
            if to.param.dtype == FP8:
                to = replace(to, layer=RoundsToFP8(to.layer))
            else:
                decode = partial(rounded_code, code=code, dtype=dtype)
        return Load(tensor, tensor.parts, decode, to, code.shape, code.stored_as)

    def _fp8_scheme(self, name: str) -> WeightScheme:
        """Returns how an FP8 weight is scaled.

        Raises:
            ValueError: config.json describes no such weights.
        """
        if self._quantization is None:
            raise ValueError("it is float8_e4m3fn; config.json has no quantization_config")
        scheme = fp8_scheme(name, self._stored, self._quantization)
        if scheme is None:
            raise ValueError("it is float8_e4m3fn; quantization_config describes no such weights")
        return scheme

    def _source(
        self, name: str, values: torch.Tensor, param: nn.Parameter
    ) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
        """Returns the stored values of one of the model's tensors, and how to decode them."""
        if name.endswith(BLOCKS) and name not in self._destinations:
            return self._mxfp4_source(name, values, param)
        if name.endswith(SCALES) and name not in self._destinations:
            return (values.view(E8M0),), as_it_is
        if values.dtype == FP8 and param.dtype != FP8:
            decode = partial(
                dequantize_fp8, block_size=self._fp8_scheme(name).block_size, dtype=self._dtype
            )
            return (values, self._scale_of(name, values)), decode
        is_scale = name.removesuffix(SCALE) in self._destinations and name.endswith(SCALE)
        if is_scale and param.dtype == torch.float32:
            values = self._kept_scale(name, values)
        elif (values.dtype, param.dtype) == (torch.int32, torch.int64):
            pass
        elif values.dtype not in PLAIN_DTYPES and values.dtype != param.dtype:
            raise ValueError(f"its dtype is {_name(values)}, which no weight may have here")
        return (values,), as_it_is

    def _mxfp4_source(
        self, name: str, blocks: torch.Tensor, param: nn.Parameter
    ) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
        if self._quantization is None or self._quantization.method != "mxfp4":
            raise ValueError("it holds MXFP4 blocks; config.json says nothing of mxfp4")
        scales = self._stored.get(name.removesuffix(BLOCKS) + SCALES)
        if scales is None:
            raise ValueError(f"its scales {name.removesuffix(BLOCKS) + SCALES} are missing")
        check_mxfp4(blocks, scales.values)
        if param.dtype == MXFP4:
            return (blocks,), _rows_of_blocks
        return (blocks, scales.values), partial(dequantize_mxfp4, dtype=self._dtype)

    def _scale_of(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        scale = self._stored.get(name + SCALE)
        if scale is None:
            raise ValueError(f"it is {_name(weight)} and its scale {name}{SCALE} is missing")
        return self._normalized(name, scale.values, weight)

    def _kept_scale(self, name: str, scale: torch.Tensor) -> torch.Tensor:
        weight = self._stored.get(name.removesuffix(SCALE))
        if weight is None:
            raise ValueError("there is no weight that it scales")
        return self._normalized(name.removesuffix(SCALE), scale, weight.values)

    def _normalized(self, name: str, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if scale.dtype == torch.uint8:
            scale = scale.view(E8M0)  # MXFP8; safetensors long had no such dtype
        if scale.dtype not in (*PLAIN_DTYPES, E8M0):
            raise ValueError(f"its scale's dtype is {_name(scale)}")
        if weight.dim() != 2:
            raise ValueError(f"its shape is {tuple(weight.shape)}; FP8 weights are matrices")
        try:
            return normalized_scale(scale, weight.shape, self._fp8_scheme(name).block_size)
        except ValueError as error:
            raise ValueError(f"its scale does not fit: {error}") from error

    def _check_superfluous(self, name: str, tensor: CheckpointTensor) -> None:
        """Raises CheckpointError unless a tensor that fills nothing may be skipped."""
        model = self._model
        if model.is_unused(name) or is_past_the_last_layer(name, model):
            return
        if is_of_another_stage(name, model):
            return
        if self._is_mxfp4(name.removesuffix(SCALES)) and name.endswith(SCALES):
            return
        # Activations and cached heads are scaled by their own magnitudes; stored scales of them are
        # not needed.
        if is_cache_scale(name):
            check_cache_scale(tensor)
            return
        # Tools for GPTQ give layers without a bias one of zeros.
        is_empty_bias = packed_module(name)[1] == "bias" and not tensor.values.any()
        if self._is_beside_packed_values(name, or_bias=is_empty_bias):
            return
        module, part = packed_module(name)
        weight = self._stored.get(f"{module}.weight")
        is_scale = part in (f"weight{SCALE}", *INPUT_SCALES)
        if is_scale and weight is not None and weight.values.dtype == FP8:
            return
        raise CheckpointError(f"{tensor.file}: the model has no tensor {tensor.name}")

    def _is_beside_packed_values(self, name: str, *, or_bias: bool = False) -> bool:
        """Returns whether a tensor, by default no bias, belongs to packed values."""
        module, part = packed_module(name)
        if not or_bias and part not in OTHER_PARTS:
            return False
        return any(f"{module}.{first}" in self._packed for first in FIRST_PARTS)

    def _check_tied_head(self) -> None:
        """Raises CheckpointError if a head that should equal the embedding differs."""
        for name, other in self._model.tied_weights.items():
            head, embedding = self._stored.get(name), self._stored.get(other)
            if head is None or embedding is None:
                continue
            is_same = head.values.dtype == embedding.values.dtype
            if not is_same or not torch.equal(head.values, embedding.values):
                raise CheckpointError(
                    f"{head.file}: tensor {head.name} differs from {embedding.name}, with which "
                    "config.json ties it"
                )

    def _where(self) -> str:
        """Returns the file that should hold the missing tensors, or the folder of several files."""
        files = {tensor.file for tensor in self._stored.values()}
        return str(files.pop() if len(files) == 1 else files.pop().parent)


def _kept_params(layer: LoadsWeights, kept: KeptWeight) -> Mapping[str, KeptPart]:
    """Returns the parameters' values of a layer that keeps a weight; none if it does not."""
    if isinstance(layer, Experts):
        return {} if layer.packing is None else kept.of_expert(layer.columns_per_scale)
    is_kept = isinstance(layer, QuantizableLinear) and layer.method.packing is not None
    return kept.params if is_kept else {}


def _rows_of_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Returns MXFP4 blocks, [..., N, K / 32, 16], as packed rows, [..., N, K / 2]."""
    return blocks.flatten(-2)


def as_it_is(values: torch.Tensor) -> torch.Tensor:
    """Returns the stored values."""
    return values


def _name(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
