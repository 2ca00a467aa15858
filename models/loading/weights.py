"""Fills a model's parameters from a checkpoint, with many threads."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from models.loading.checkpoint import CheckpointError
from models.loading.plan import Load
from models.loading.staging import (
    MAX_BYTES_IN_FLIGHT,
    BytesInFlight,
    PinnedStaging,
    Staging,
    stay_on_the_cpu,
)
from models.number_formats import E8M0, FP8, MXFP4

MAX_THREADS = 8
DECODED_GROWTH = 4
"""Bytes decoded from one stored byte: four bits become sixteen."""
DECODED_BYTES = 2
"""Bytes of one element; GGUF has types of fewer bits."""
PROGRESS_INTERVAL_S = 1.0
FP8_NAN = 0x7F
"""All bits but the sign: the one NaN of FP8, which has no infinity."""
LARGEST_E8M0 = 190
"""2^63, the largest kept scale: products of 4-bit floats overflow from 2^64 on. 255 is NaN."""


def load_weights(
    loads: Sequence[Load],
    device: torch.device,
    on_progress: Callable[[str], None],
    *,
    is_shared: bool = False,
    max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
) -> None:
    """Copies stored tensors into a model's parameters.

    If other ranks share the model, only this one's slices are read of tensors that are kept as
    stored.

    On a CUDA device bytes go through pinned buffers and are decoded, cut and converted there; loads
    take up to `max_bytes_in_flight` beside the model. on_progress gets one line for the operator
    about once a second and at the end.

    Raises:
        CheckpointError: a tensor has the wrong shape, or holds NaN, infinity or a scale that is
            too large for products.
    """
    staging: Staging = PinnedStaging(device) if device.type == "cuda" else stay_on_the_cpu
    in_flight = BytesInFlight(max_bytes_in_flight)

    def run(load: Load) -> tuple[torch.Tensor, int]:
        with torch.no_grad(), in_flight.take(peak_bytes(load)):
            if is_shared and load.is_view:
                return _load_slices(load, staging)
            return _load(load, staging), _num_bytes(load)

    progress = _Progress(loads, on_progress)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load-weights")
    try:
        futures = [pool.submit(run, load) for load in loads]
        are_finite = []
        for future in futures:
            is_finite, num_bytes = future.result()
            are_finite.append(is_finite)
            progress.add(num_bytes)
    finally:
        pool.shutdown(cancel_futures=True)
    # Read together: on a CUDA device each read waits for all queued work.
    for load, has_only_numbers in zip(loads, torch.stack(are_finite).tolist(), strict=True):
        if not has_only_numbers:
            is_kept_scale = load.destination.param.dtype == MXFP4 or load.stored_as == "nvfp4"
            raise CheckpointError(
                f"{load.tensor.file}: tensor {load.tensor.name} holds NaN or infinity"
                + (", or a scale of 2^64 or more" if is_kept_scale else "")
            )
    progress.finish()


def _load(load: Load, staging: Staging) -> torch.Tensor:
    """Fills one destination; returns whether all its values are finite, as a tensor."""
    values = load.decode(*[staging(part) for part in load.parts])
    _fill(load, values)
    return all_finite(values)


def _load_slices(load: Load, staging: Staging) -> tuple[torch.Tensor, int]:
    """Fills one destination from slices of views of the file.

    Returns:
        Whether the slices are finite, as a tensor, and their bytes.
    """
    with _StagedCopies(staging) as copies:
        _fill(load, load.decode(*load.parts))
    return torch.stack(copies.are_finite).all(), copies.num_bytes


def _fill(load: Load, values: torch.Tensor) -> None:
    destination = load.destination
    try:
        destination.layer.weight_loader(destination.param, values, destination.shard_id)
    except ValueError as error:
        raise CheckpointError(f"{load.tensor.file}: tensor {load.tensor.name}: {error}") from error


class _StagedCopies(TorchFunctionMode):
    """Stages the sources of copies, which layers cut out of whole tensors, and checks them."""

    def __init__(self, staging: Staging) -> None:
        super().__init__()
        self._staging = staging
        self.are_finite: list[torch.Tensor] = []
        self.num_bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replaces the source of a copy."""
        if func is torch.Tensor.copy_:
            target, source = args
            self.num_bytes += source.nbytes
            source = self._staging(source)
            self.are_finite.append(all_finite(source))
            args = (target, source)
        return func(*args, **(kwargs or {}))


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Returns a boolean scalar on the device of `values`."""
    if not values.numel() or not values.is_floating_point():
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.dtype == FP8:
        return ((values.view(torch.uint8) & FP8_NAN) != FP8_NAN).all()
    if values.dtype == E8M0:
        return (values.view(torch.uint8) <= LARGEST_E8M0).all()
    # aminmax allocates nothing of the tensor's size, and propagates NaN.
    smallest, largest = values.aminmax()
    return smallest.isfinite() & largest.isfinite()


def _num_bytes(load: Load) -> int:
    return sum(part.nbytes for part in load.parts)


def peak_bytes(load: Load) -> int:
    """Returns about how much memory a load takes, with the values that it decodes."""
    stored = _num_bytes(load)
    if load.is_view:
        return stored
    return stored + max(DECODED_GROWTH * stored, DECODED_BYTES * prod(load.shape))


class _Progress:
    def __init__(self, loads: Sequence[Load], report: Callable[[str], None]) -> None:
        self._report = report
        self._num_tensors, self._num_loaded = len(loads), 0
        self._total_bytes, self._loaded_bytes = sum(map(_num_bytes, loads)), 0
        self._started_s = self._reported_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._num_loaded += 1
        self._loaded_bytes += num_bytes
        if time.monotonic() - self._reported_s >= PROGRESS_INTERVAL_S:
            self.finish()

    def finish(self) -> None:
        self._reported_s = time.monotonic()
        speed = self._loaded_bytes / max(self._reported_s - self._started_s, 1e-3)
        self._report(
            f"loaded {self._num_loaded} of {self._num_tensors} tensors, "
            f"{self._loaded_bytes / 1e9:.1f} of {self._total_bytes / 1e9:.1f} GB "
            f"({speed / 1e6:.0f} MB/s)"
        )
