"""Limits the query tokens of a step, fewer after a shortage of memory."""

NUM_GOOD_STEPS = 500
"""Steps without a failure before the budget doubles."""


class StepBudget:
    """A limit halved by every step that runs out of memory and doubled after good ones."""

    def __init__(self, limit: int) -> None:
        self.tokens = limit
        self._limit = limit
        self._num_good_steps = 0

    def halve(self, num_tokens: int) -> None:
        """Sets a budget below a failed step of `num_tokens`."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_good_steps = 0

    def count_good_step(self) -> None:
        """Counts a step that did not run out of memory."""
        if self.tokens == self._limit:
            return
        self._num_good_steps += 1
        if self._num_good_steps == NUM_GOOD_STEPS:
            self.tokens = min(2 * self.tokens, self._limit)
            self._num_good_steps = 0
