"""A copy of device memory in the host's memory, for the length of a sleep."""

from collections.abc import Sequence

import structlog
import torch
from torch import Tensor

from services.engine.worker.pinned_pages import PinnedPages

log = structlog.get_logger()


class HostCopy:
    """A copy of several tensors: made at once, then `write_back`, then `refresh` or `free`."""

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
        self.num_bytes: int = sum(sizes)
        """Bytes of all tensors."""
        if self.num_bytes > num_available_bytes:
            raise MemoryError(
                f"the weights take {self.num_bytes / 2**30:.2f} GiB of the host's memory, which "
                f"has {num_available_bytes / 2**30:.2f} GiB free"
            )
        self._pages: PinnedPages | None = None
        if device.type == "cuda" and self.num_bytes:
            self._pages = self._pinned(self.num_bytes)
            memory = self._pages.memory
        else:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        self._parts = memory.split(sizes)  # type: ignore[no-untyped-call]  # torch has no types here
        self.refresh()

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether these are the tensors that it was made of."""
        return [id(each) for each in tensors] == [id(each) for each in self._tensors]

    def refresh(self) -> None:
        """Copies the tensors again, and waits until the copy is complete."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        self._wait()

    def write_back(self) -> None:
        """Copies everything back, and waits until that is complete."""
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            tensor.copy_(part, non_blocking=True)
        self._wait()

    def free(self) -> None:
        """Frees the memory."""
        self._parts = ()
        if self._pages:
            self._pages.free()

    @staticmethod
    def _pinned(num_bytes: int) -> PinnedPages:
        """Pins the memory, where the system lets it; copies from other memory take longer."""
        pages = PinnedPages(num_bytes)
        if pages.status:
            log.warning("weights_not_pinned", num_bytes=num_bytes, status=pages.status)
        return pages

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
