"""Decides how each stored tensor is loaded, before any of them is read."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError, CheckpointTensor
from models.loading.dequantize import (
    check_mxfp4,
    dequantize_fp8,
    dequantize_mxfp4,
    normalized_scale,
)
from models.loading.names import (
    Destination,
    find_destinations,
    is_past_the_last_layer,
    renamed,
)
from models.number_formats import E8M0, FP8, MXFP4

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE, INPUT_SCALE = "_scale", "input_scale"
BLOCKS, SCALES = "_blocks", "_scales"
_CACHE_SCALE = re.compile(r"\.self_attn\.(.+\.)?([kv]_scale|[kv]_proj\.output_scale)$")


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

    def into(self, params: Mapping[nn.Parameter, nn.Parameter]) -> "Load":
        """Returns the same load into the parameter that replaces its own."""
        param = params[self.destination.param]
        return replace(self, destination=replace(self.destination, param=param))


def by_model_name(
    tensors: Sequence[CheckpointTensor], model: CausalLM
) -> dict[str, CheckpointTensor]:
    """Returns the stored tensors by their names in the model's family.

    Raises:
        CheckpointError: two tensors have the same one.
    """
    named: dict[str, CheckpointTensor] = {}
    for tensor in tensors:
        name = renamed(tensor.name, model)
        if name in named:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is {named[name].name} of {named[name].file}"
            )
        named[name] = tensor
    return named


def plan_loads(
    stored: Mapping[str, CheckpointTensor], model: CausalLM, dtype: torch.dtype
) -> list[Load]:
    """Returns the loads, in stored order.

    Weights stay FP8 if their parameters are; others are dequantised to `dtype` on the way.

    Raises:
        CheckpointError: a tensor is missing, unknown, of an unreadable dtype, or without its scale.
    """
    return _Plan(stored, model, dtype).loads()


class _Plan:
    """The rules of `plan_loads`."""

    def __init__(
        self, stored: Mapping[str, CheckpointTensor], model: CausalLM, dtype: torch.dtype
    ) -> None:
        self._stored = stored
        self._model = model
        self._dtype = dtype
        self._quantization = model.config.quantization
        self._destinations = find_destinations(model)

    def loads(self) -> list[Load]:
        self._check_tied_head()
        missing = set(self._destinations)
        loads = []
        for name, tensor in self._stored.items():
            target = self._target(name)
            if target is None:
                self._check_superfluous(name, tensor)
                continue
            try:
                parts, decode = self._source(name, tensor.values, self._destinations[target].param)
            except ValueError as error:
                raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
            loads.append(Load(tensor, parts, decode, self._destinations[target]))
            missing.discard(target)
        if missing:
            raise CheckpointError(
                f"{self._where()}: {len(missing)} tensors are missing, the first is {min(missing)}"
            )
        return loads

    def _target(self, name: str) -> str | None:
        """Returns which of the model's tensors a stored one fills."""
        if name in self._destinations:
            return name
        base = name.removesuffix(BLOCKS)
        if self._is_mxfp4(base):
            return base
        is_kept = name.endswith(SCALES) and self._is_mxfp4(name.removesuffix(SCALES))
        scale = name.removesuffix(SCALES) + SCALE
        return scale if is_kept and scale in self._destinations else None

    def _is_mxfp4(self, base: str) -> bool:
        return base in self._destinations and base + BLOCKS in self._stored

    def _source(
        self, name: str, values: torch.Tensor, param: nn.Parameter
    ) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
        """Returns the stored values of one of the model's tensors, and how to decode them."""
        if name.endswith(BLOCKS) and name not in self._destinations:
            return self._mxfp4_source(name, values, param)
        if name.endswith(SCALES) and name not in self._destinations:
            return (values.view(E8M0),), as_it_is
        if values.dtype == FP8 and param.dtype != FP8:
            return (values, self._scale_of(name, values)), self._dequantize_fp8
        if name.endswith(SCALE) and param.dtype == torch.float32:
            values = self._kept_scale(name, values)
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
        if self._quantization is None:
            raise ValueError(f"it is {_name(weight)}; config.json has no quantization_config")
        scale = self._stored.get(name + SCALE)
        if scale is None:
            raise ValueError(f"it is {_name(weight)} and its scale {name}{SCALE} is missing")
        return self._normalized(scale.values, weight)

    def _kept_scale(self, name: str, scale: torch.Tensor) -> torch.Tensor:
        weight = self._stored.get(name.removesuffix(SCALE))
        if weight is None:
            raise ValueError("there is no weight that it scales")
        return self._normalized(scale, weight.values)

    def _normalized(self, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert self._quantization is not None, "callers checked, or the model has FP8 parameters"
        if scale.dtype not in (*PLAIN_DTYPES, E8M0):
            raise ValueError(f"its scale's dtype is {_name(scale)}")
        if weight.dim() != 2:
            raise ValueError(f"its shape is {tuple(weight.shape)}; FP8 weights are matrices")
        try:
            return normalized_scale(scale, weight.shape, self._quantization.block_size)
        except ValueError as error:
            raise ValueError(f"its scale does not fit: {error}") from error

    def _dequantize_fp8(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert self._quantization is not None, "the plan checked it"
        return dequantize_fp8(weight, scale, self._quantization.block_size, self._dtype)

    def _check_superfluous(self, name: str, tensor: CheckpointTensor) -> None:
        """Raises CheckpointError unless a tensor that fills nothing may be skipped."""
        if self._model.is_derived(name) or is_past_the_last_layer(name, self._model):
            return
        if self._is_mxfp4(name.removesuffix(SCALES)) and name.endswith(SCALES):
            return
        # Activations and cached heads are scaled by their own magnitudes; stored scales of them are
        # not needed.
        if _CACHE_SCALE.search(name):
            return
        base = name.removesuffix(INPUT_SCALE) + "weight" if name.endswith(INPUT_SCALE) else name
        weight = self._stored.get(base.removesuffix(SCALE))
        if base.removesuffix(SCALE) != name and weight is not None and weight.values.dtype == FP8:
            return
        raise CheckpointError(f"{tensor.file}: the model has no tensor {tensor.name}")

    def _check_tied_head(self) -> None:
        """Raises CheckpointError if a head that should equal the embedding differs."""
        for name, other in self._model.tied_weights.items():
            head, embedding = self._stored.get(name), self._stored.get(other)
            if head is None or embedding is None:
                continue
            if not torch.equal(head.values, embedding.values):
                raise CheckpointError(
                    f"{head.file}: tensor {head.name} differs from {embedding.name}, with which "
                    "config.json ties it"
                )

    def _where(self) -> str:
        """Returns the file that should hold the missing tensors, or the folder of several files."""
        files = {tensor.file for tensor in self._stored.values()}
        return str(files.pop() if len(files) == 1 else files.pop().parent)


def _rows_of_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Returns MXFP4 blocks, [..., N, K / 32, 16], as packed rows, [..., N, K / 2]."""
    return blocks.flatten(-2)


def as_it_is(values: torch.Tensor) -> torch.Tensor:
    """Returns the stored values."""
    return values


def _name(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")
