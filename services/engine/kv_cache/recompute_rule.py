"""Compares the time of loading blocks with the time of computing their tokens again."""

_DECAY = 0.9
"""Weight of what earlier steps showed, when another step has run."""


class RecomputeRule:
    """Loads only what is faster to load than to compute, by measured times.

    Both are running averages of this engine: so the rule follows the model, its parallelism and the
    load. Before the first prompt was computed, everything is loaded.
    """

    def __init__(self, block_load_s: float) -> None:
        """Starts with the time that loading a block took when the worker started."""
        self._block_load_s = block_load_s
        self._num_tokens = 0.0
        self._elapsed_s = 0.0
        self._num_reads = 0.0
        self._read_s = 0.0

    def observe_prompts(self, num_tokens: int, elapsed_us: int) -> None:
        """Takes the tokens and the time of a step that computed prompts."""
        self._num_tokens = _DECAY * self._num_tokens + num_tokens
        self._elapsed_s = _DECAY * self._elapsed_s + elapsed_us / 1e6

    def observe_reads(self, num_blocks: int, elapsed_us: int) -> None:
        """Takes the time of reading blocks from disk."""
        self._num_reads = _DECAY * self._num_reads + num_blocks
        self._read_s = _DECAY * self._read_s + elapsed_us / 1e6

    def pays(self, num_blocks: int, num_tokens: int, *, num_reads: int = 0) -> bool:
        """Whether loading blocks, some of them from disk first, is no slower than computing."""
        compute_s = self.compute_s(num_tokens)
        if compute_s is None:
            return True
        read_s = num_reads * self._read_s / self._num_reads if self._num_reads else 0.0
        return num_blocks * self._block_load_s + read_s <= compute_s

    def compute_s(self, num_tokens: int) -> float | None:
        """Returns the seconds that computing as many tokens takes; None if not measured yet."""
        return num_tokens * self._elapsed_s / self._num_tokens if self._num_tokens else None
