"""Failed allocations, and memory that PyTorch keeps for later ones."""

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that an allocation failed and nothing worse.

    torch has a type for that on a GPU alone; on a CPU its allocator and the C++ library have words.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in ("DefaultCPUAllocator", "std::bad_alloc"))


def release_memory() -> None:
    """Gives back what torch keeps for later; graphs and what is in use stay where they are.

    Called once the error is forgotten: its traceback holds the tensors of the step.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.empty_cache()
