"""A copy of device memory in the host's memory, for the length of a sleep."""

from collections.abc import Sequence

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()


class HostCopy:
    """A copy of several tensors: made at once, then `write_back`, then `free`."""

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, *, num_available_bytes: int
    ) -> None:
        """Copies the tensors, and waits until the copy is complete.

        Args:
            tensors: [bytes] uint8 each, on `device`.
            device: a GPU, whose copies are fast from pinned memory, or the CPU.
            num_available_bytes: that the host can still give.

        Raises:
            MemoryError: the host has too little memory.
        """
        self._tensors = tensors
        self._device = device
        sizes = [each.nbytes for each in tensors]
        if sum(sizes) > num_available_bytes:
            raise MemoryError(
                f"the weights take {sum(sizes) / 2**30:.2f} GiB of the host's memory, which has "
                f"{num_available_bytes / 2**30:.2f} GiB free"
            )
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self._is_pinned = device.type == "cuda" and self._pin()
        self._parts = self._memory.split(sizes)  # type: ignore[no-untyped-call]  # torch has no types here
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        self._wait()

    def write_back(self) -> None:
        """Copies everything back, and waits until that is complete."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.copy_(part, non_blocking=True)
        self._wait()

    def free(self) -> None:
        """Frees the memory."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]  # as above
        self._parts = ()
        self._memory = self._memory.new_empty(0)

    def _pin(self) -> bool:
        """Pins the memory, where the system lets it; copies from other memory take longer."""
        if not self._memory.nbytes:
            return False
        status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]  # as above
            self._memory.data_ptr(), self._memory.nbytes, 0
        )
        if int(status):
            log.warning("weights_not_pinned", num_bytes=self._memory.nbytes, status=int(status))
        return not int(status)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
