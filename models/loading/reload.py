"""Loads weights again into a model that runs: its checkpoint's, or others of the same form."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointError, open_checkpoint
from models.loading.loader import tensor_defaults
from models.loading.packed_weights import find_packed
from models.loading.plan import PLAIN_DTYPES, Load, as_it_is, plan_loads
from models.loading.rounding import RoundsToFP8
from models.loading.stored_tensors import by_model_name
from models.loading.weights import all_finite, load_weights, peak_bytes

MAX_BYTES_IN_FLIGHT = 2**28
"""Device memory for tensors on their way; the KV cache has left little."""


def plan_reload(
    model: CausalLM,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    is_part: bool = False,
) -> list[Load]:
    """Returns the loads that fill a loaded model's parameters as `load_model` does.

    Only headers are read. Files stay open as long as the loads exist. Heads that pool have files of
    their own and are left out.

    Args:
        model: of `load_model`, on `device`.
        folder: a checkpoint of the same architecture and format.
        device: of the model.
        dtype: of its activations.
        is_part: whether tensors may be missing.

    Raises:
        MissingTensorsError: tensors are missing.
        CheckpointError: the checkpoint does not fit the model.
    """
    with tensor_defaults(device, dtype), torch.no_grad():
        stored = by_model_name(open_checkpoint(folder), model)
        packed = find_packed(stored, model.config.quantization, dtype)
        loads = plan_loads(stored, packed, model, dtype, is_part=is_part)
    for load in loads:
        _check_format(load)
    return loads


def check_loads(loads: Sequence[Load]) -> None:
    """Reads and decodes every tensor on the CPU and checks it; changes nothing.

    A rank of several reads its own share of tensors that are kept as stored. Any thread may call
    it while steps run.

    Raises:
        CheckpointError: a tensor has another shape than its parameter, holds NaN or infinity, or
            does not fit the range of the parameter's dtype.
    """
    with torch.no_grad():
        for load in _of_this_rank(loads):
            destination = load.destination
            layer = destination.layer
            # Rounding changes no shape, and takes long on a CPU.
            layer = layer.layer if isinstance(layer, RoundsToFP8) else layer
            values = load.decode(*load.parts)
            try:
                if not load.is_view:
                    _check_finite(values)
                with _WithoutWrites():  # type: ignore[no-untyped-call]  # torch
                    layer.weight_loader(destination.param, values, destination.shard_id)
            except ValueError as error:
                tensor = load.tensor
                raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error


def reload_weights(
    loads: Sequence[Load], *, device: torch.device, dtype: torch.dtype, is_shared: bool
) -> None:
    """Fills the parameters of a plan, at their addresses. No step may run meanwhile.

    Experts may have moved between ranks since the plan was made. Arguments are those of
    `load_weights` and `plan_reload`.

    Raises:
        CheckpointError: a tensor changed since it was checked; some parameters are changed.
    """
    with tensor_defaults(device, dtype), torch.no_grad():
        load_weights(
            _of_this_rank(loads),
            device,
            lambda line: None,
            is_shared=is_shared,
            max_bytes_in_flight=MAX_BYTES_IN_FLIGHT,
        )


def reload_bytes(loads: Sequence[Load]) -> int:
    """Returns how many bytes of the device `reload_weights` takes for a while, at most."""
    return max((MAX_BYTES_IN_FLIGHT, *map(peak_bytes, loads)))


def _of_this_rank(loads: Sequence[Load]) -> list[Load]:
    return [own for load in loads for own in load.of_this_rank()]


def _check_format(load: Load) -> None:
    """Raises CheckpointError if plain values would fill a parameter of a smaller format."""
    param, values = load.destination.param, load.parts[0]
    is_rounded = isinstance(load.destination.layer, RoundsToFP8)
    if load.decode is not as_it_is or is_rounded or param.dtype in PLAIN_DTYPES:
        return
    if values.dtype in PLAIN_DTYPES:
        kept, stored = (str(each.dtype).removeprefix("torch.") for each in (param, values))
        raise CheckpointError(
            f"{load.tensor.file}: tensor {load.tensor.name}: its dtype is {stored}; the model "
            f"keeps this weight as {kept} and needs it as the first checkpoint stores it"
        )


class _WithoutWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Has copies into parameters check their source instead, and other writes do nothing."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operator that writes nothing."""
        del types
        if not func._schema.is_mutable:  # type: ignore[attr-defined]  # of operator overloads
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            _check_copy(*args[:2])
        return args[0]


def _check_copy(target: Tensor, source: Tensor) -> None:
    """Raises ValueError unless a copy would fill the target with finite values."""
    if target.shape != source.shape:
        raise ValueError(f"its shape is {tuple(source.shape)}; the model needs {target.shape}")
    narrows = source.dtype in PLAIN_DTYPES and target.dtype in PLAIN_DTYPES
    if narrows and torch.finfo(target.dtype).max < torch.finfo(source.dtype).max:
        source = source.to(target.dtype)
    _check_finite(source)


def _check_finite(values: Tensor) -> None:
    if not bool(all_finite(values)):
        raise ValueError("it holds NaN, infinity, or values beyond the range of its parameter")
