"""CUDA's virtual memory management, called through ctypes, so that there is nothing to compile.

Source: CUDA driver API, section 6.14, "Virtual Memory Management".
"""

import ctypes
from typing import Any

_DRIVER = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_SUPPORTS_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE and the access to read and write."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; its flags are compression, GPUDirect and usage, all off."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VirtualMemoryDriver:
    """The driver's calls for the virtual memory of one GPU, whose context PyTorch has made."""

    def __init__(self, index: int) -> None:
        """Loads the driver.

        Raises:
            ValueError: the driver or the GPU has no virtual memory management.
        """
        try:
            self._library = ctypes.CDLL(_DRIVER)
            supported = ctypes.c_int()
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call(
                "cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTS_VIRTUAL_MEMORY, device
            )
        except (OSError, RuntimeError, AttributeError) as error:
            raise ValueError(f"--enable-sleep needs CUDA's virtual memory: {error}") from error
        if not supported.value:
            raise ValueError("--enable-sleep needs virtual memory, which this GPU does not have")
        location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location=location, flags=_READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity), ctypes.byref(self._properties), ctypes.c_int(0),
        )  # fmt: skip
        self.granularity: int = granularity.value
        """Bytes that sizes of pieces are multiples of."""

    def reserve(self, num_bytes: int) -> int:
        """Reserves a range of addresses; returns its begin."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        none = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, *none)
        return address.value

    def map(self, address: int, num_bytes: int) -> None:
        """Takes physical memory and maps it at an address of a reserved range.

        Raises:
            MemoryError: there is too little.
        """
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        flags = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), flags)
        try:
            at = ctypes.c_uint64(address)
            self._call("cuMemMap", at, size, ctypes.c_size_t(0), handle, flags)
        finally:
            # The mapping holds the memory from here on; unmapping gives it back.
            self._call("cuMemRelease", handle)
        access, count = ctypes.byref(self._access), ctypes.c_size_t(1)
        self._call("cuMemSetAccess", at, size, access, count)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Gives back the physical memory of a piece that `map` has mapped."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise MemoryError("the GPU has too little free memory")
        if status:
            raise RuntimeError(f"{name} failed with CUDA error {status}")
