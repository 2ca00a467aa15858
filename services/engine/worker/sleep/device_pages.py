"""Releasable memory of a GPU.

A range of addresses is reserved once. Physical memory is mapped into it, unmapped and given back to
the driver, and mapped again at the same addresses.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.worker.sleep.virtual_memory import VirtualMemoryDriver

_ALIGNMENT = 512
"""Bytes that each tensor begins at a multiple of, as with PyTorch's own allocator."""


class Driver(Protocol):
    """The calls for virtual memory; VirtualMemoryDriver."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """Reserves a range of addresses; returns its begin."""

    def map(self, address: int, num_bytes: int) -> None:
        """Maps physical memory at an address; raises MemoryError if there is too little."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Gives back the physical memory of a piece that `map` has mapped."""


class MappedRange:
    """A range of addresses, whose begin is mapped in pieces as it is taken."""

    def __init__(self, driver: Driver, capacity: int) -> None:
        """Reserves addresses for at least `capacity` bytes, which take no memory."""
        self._driver = driver
        self._begin = driver.reserve(self._rounded(capacity))
        self._end = self._mapped_end = self._begin
        self._pieces: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of physical memory, when it is mapped."""
        return self._mapped_end - self._begin

    def take(self, num_bytes: int) -> int:
        """Returns the address of more mapped memory.

        Raises:
            MemoryError: there is too little; nothing has changed.
        """
        address = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        num_missing = address + num_bytes - self._mapped_end
        if num_missing > 0:
            piece = self._mapped_end, self._rounded(num_missing)
            self._driver.map(*piece)
            self._pieces.append(piece)
            self._mapped_end = sum(piece)
        self._end = address + num_bytes
        return address

    def unmap(self) -> None:
        """Gives all physical memory back."""
        for piece in self._pieces:
            self._driver.unmap(*piece)

    def map(self) -> None:
        """Maps physical memory again; raises MemoryError, with none mapped, if that is too much."""
        for index, piece in enumerate(self._pieces):
            try:
                self._driver.map(*piece)
            except MemoryError:
                for mapped in self._pieces[:index]:
                    self._driver.unmap(*mapped)
                raise

    def _rounded(self, num_bytes: int) -> int:
        granularity = self._driver.granularity
        return -(-num_bytes // granularity) * granularity


@dataclass(frozen=True, slots=True)
class _Array:
    """Memory in the form from which PyTorch makes a tensor without a copy."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }


class DevicePages:
    """Releasable memory of a GPU. Its tensors live as long as the process."""

    def __init__(self, device: torch.device, *, is_zeroed: bool) -> None:
        """Reserves as many addresses as the GPU has bytes.

        Args:
            device: the GPU, which PyTorch uses already.
            is_zeroed: whether what is taken and restored is zeroed.

        Raises:
            ValueError: the GPU has no virtual memory management.
        """
        self._device = device
        self._is_zeroed = is_zeroed
        driver = VirtualMemoryDriver(device.index or 0)
        capacity = torch.cuda.get_device_properties(device).total_memory
        self._range = MappedRange(driver, capacity)
        self._tensors: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of physical memory, when it is there."""
        return self._range.num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Returns memory, [num_bytes] uint8, as a storage of its own.

        Raises:
            MemoryError: the GPU has too little.
        """
        try:
            address = self._range.take(num_bytes)
        except MemoryError:
            torch.cuda.empty_cache()
            address = self._range.take(num_bytes)
        tensor = torch.as_tensor(_Array(address, num_bytes), device=self._device)
        self._tensors.append(tensor)
        return tensor.zero_() if self._is_zeroed else tensor

    def release(self) -> None:
        """Gives all physical memory back to the driver, once the device is idle."""
        torch.cuda.synchronize(self._device)
        self._range.unmap()

    def restore(self) -> None:
        """Takes physical memory again, all or none.

        Raises:
            MemoryError: the GPU has too little.
        """
        torch.cuda.empty_cache()
        self._range.map()
        for tensor in self._tensors if self._is_zeroed else ():
            tensor.zero_()
