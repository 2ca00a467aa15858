"""Steps of a worker without a result yet, and failed ones in their place."""

from dataclasses import dataclass
from typing import Protocol

from services.engine.batch import StepFailure, StepResult


class Pending(Protocol):
    """A step that was executed; PendingResult."""

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""

    def message(self) -> StepResult:
        """Returns the result."""


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The result of a step that computed nothing, in its place among the others."""

    step_id: int
    failure: StepFailure
    num_collectives: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""
        return True

    def message(self) -> StepResult:
        """Returns the result."""
        return StepResult(
            step_id=self.step_id, failure=self.failure, num_collectives=self.num_collectives
        )
