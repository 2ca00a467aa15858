"""How many query tokens a step may have, which memory can bring down for a while."""

NUM_GOOD_STEPS = 500
"""Steps without a failure after which twice as much is tried again."""


class StepBudget:
    """Halved by every step that runs out of memory, doubled again after many that do not."""

    def __init__(self, limit: int) -> None:
        """Starts with all that is configured."""
        self.tokens = limit
        self._limit = limit
        self._num_good_steps = 0

    def halve(self, num_tokens: int) -> None:
        """Stays below a step of `num_tokens` that failed."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_good_steps = 0

    def count_good_step(self) -> None:
        """Counts a step that had memory enough."""
        if self.tokens == self._limit:
            return
        self._num_good_steps += 1
        if self._num_good_steps == NUM_GOOD_STEPS:
            self.tokens = min(2 * self.tokens, self._limit)
            self._num_good_steps = 0
