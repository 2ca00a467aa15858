"""Steps for which the device's memory does not suffice."""

from dataclasses import dataclass

import torch

from services.engine.batch import StepFailure, StepResult


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The result of a step that computed nothing, in its place among the others."""

    step_id: int
    failure: StepFailure

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""
        return True

    def message(self) -> StepResult:
        """Returns the result."""
        return StepResult(step_id=self.step_id, failure=self.failure)


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
