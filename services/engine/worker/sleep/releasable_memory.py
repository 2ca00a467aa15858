"""Memory whose pages can be given back and taken again at the same addresses."""

import mmap
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ReleasableMemory(Protocol):
    """Memory of tensors. Their addresses outlive `release`, so captured graphs stay valid."""

    @property
    def num_bytes(self) -> int:
        """Bytes that were taken."""

    def take(self, num_bytes: int) -> Tensor:
        """Returns memory, [num_bytes] uint8, as a storage of its own.

        It is aligned for every dtype. Its content is zero if the memory is one that is zeroed.

        Raises:
            MemoryError: there is too little.
        """

    def release(self) -> None:
        """Gives all pages back; nothing may use the tensors until `restore`."""

    def restore(self) -> None:
        """Takes pages again, all or none, with the content that `take` has.

        Raises:
            MemoryError: there are too few.
        """


class HostPages:
    """Releasable memory of a model on a CPU; it is always zeroed."""

    def __init__(self) -> None:
        """Takes nothing yet."""
        self._maps: list[mmap.mmap] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that were taken."""
        return sum(map(len, self._maps))

    def take(self, num_bytes: int) -> Tensor:
        """Returns zeros, [num_bytes] uint8; the kernel gives pages when they are written."""
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{num_bytes} bytes of memory: {error}") from error
        self._maps.append(pages)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def release(self) -> None:
        """Gives all pages back."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Does nothing: pages come back, zeroed, when they are used."""


class _ZerosFrom(TorchFunctionMode):
    """Makes `torch.zeros` take its memory from a releasable one, which is zeroed."""

    def __init__(self, memory: ReleasableMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replaces a new tensor of zeros."""
        kwargs = kwargs or {}
        if func is not torch.zeros:
            return func(*args, **kwargs)
        shape = tuple(args[0]) if isinstance(args[0], tuple | list | torch.Size) else args
        dtype = kwargs["dtype"]
        memory = self._memory.take(max(1, prod(shape)) * dtype.itemsize)
        return memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def zeros_from(memory: ReleasableMemory | None) -> AbstractContextManager[object]:
    """Makes `torch.zeros` in the block take its memory from `memory`, unless that is None."""
    return nullcontext() if memory is None else _ZerosFrom(memory)
