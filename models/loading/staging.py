"""Moves stored tensors to the model's device."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

import torch

CHUNK_BYTES = 16 * 2**20
"""Size of a pinned buffer; each thread fills one while its other one is copied."""
MAX_BYTES_IN_FLIGHT = 2**30
"""Device memory for tensors that are being loaded; a larger tensor goes alone."""


class Staging(Protocol):
    """Brings a stored tensor to the model's device."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values`, on the model's device."""


class PinnedStaging:
    """Copies tensors from the CPU to a CUDA device through pinned buffers, from many threads.

    Copies are only queued: queue reads of the tensor on the same stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = threading.local()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of `values` on the device, of the same shape and dtype."""
        copy = torch.empty(values.shape, dtype=values.dtype, device=self._device)
        source, target = _bytes(values), _bytes(copy)
        with torch.cuda.device(self._device):
            for start in range(0, len(source), CHUNK_BYTES):
                chunk = source[start : start + CHUNK_BYTES]
                buffer = next(self._buffers())
                buffer.left.synchronize()
                staged = buffer.memory[: len(chunk)].copy_(chunk)
                target[start : start + len(chunk)].copy_(staged, non_blocking=True)
                buffer.left.record()
        return copy

    def _buffers(self) -> "cycle[_Buffer]":
        """Returns this thread's buffers in turns, made on first use."""
        if not hasattr(self._thread, "buffers"):
            self._thread.buffers = cycle([_Buffer.allocate(), _Buffer.allocate()])
        buffers: cycle[_Buffer] = self._thread.buffers
        return buffers


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory, and the event after which its content has been copied."""

    memory: torch.Tensor
    left: torch.cuda.Event

    @classmethod
    def allocate(cls) -> "_Buffer":
        memory = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        return cls(memory, torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch


def stay_on_the_cpu(values: torch.Tensor) -> torch.Tensor:
    """Returns `values` unchanged: pages of their file, read when they are copied."""
    return values


class BytesInFlight:
    """Limits the bytes that threads hold together."""

    def __init__(self, limit: int = MAX_BYTES_IN_FLIGHT) -> None:
        self._limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Waits until num_bytes are free, or all are, and takes them for the block's length."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken or self._taken + num_bytes <= self._limit
            )
            self._taken += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= num_bytes
                self._changed.notify_all()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's bytes, [number of bytes] uint8.

    A scalar that was expanded to a scale is copied first: with a stride of 0 it has no bytes.
    """
    return values.contiguous().reshape(-1).view(torch.uint8)
