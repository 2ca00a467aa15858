"""Which blocks of states have content in a replay: its own steps wrote or copied it."""

import numpy as np
import numpy.typing as npt

from services.engine.limits import StepLimits
from services.engine.worker.inputs.batch import Batch

Blocks = npt.NDArray[np.int64]
"""Numbers of blocks."""
NO_COPIES: Blocks = np.zeros((2, 0), np.int64)


class StateContent:
    """The blocks whose states are those of the recording.

    A request that starts from a snapshot which no step of the recording made needs its tokens
    computed once more.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._numbers = limits.state_blocks
        self._known: set[int] = set()

    def compute(self, blocks: Blocks, num_tokens: int) -> None:
        """Notes that a row's first tokens are computed; blocks: of its states."""
        if self._numbers is not None:
            self._known.update(self._numbers.after(blocks.tolist(), num_tokens))

    def lose(self, blocks: Blocks) -> None:
        """Notes that blocks have other content, which no step of the replay made."""
        self._known.difference_update(blocks.tolist())

    def save(self, batch: Batch) -> None:
        """Notes the snapshots that a step makes before it computes."""
        if batch.saved_states is not None:
            self._copy(batch.saved_states)

    def lacking(
        self, batch: Batch, blocks: Blocks, start: int, *, lacks_tokens: bool
    ) -> Blocks | None:
        """Finds out whether a row starts from a state that no step has made.

        Args:
            batch: the step that the row starts with.
            blocks: of the row's states.
            start: its tokens before the step.
            lacks_tokens: whether keys and values of some are missing, which need a state, too.

        Returns:
            Blocks to copy once these tokens are computed, [2, n], from the row's to the blocks that
            the step copies; None if the state is known.
        """
        if self._numbers is None or not start:
            return None
        own = self._numbers.after(blocks.tolist(), start)
        restored: dict[int, int] = {}
        if batch.restored_states is not None:
            restored = dict(zip(*batch.restored_states[::-1].tolist(), strict=True))
        sources = [restored.get(block, block) for block in own]
        if self._known.issuperset(sources) and not lacks_tokens:
            return None
        self._known.update(sources)
        return np.array([own, sources], np.int64)

    def run(self, batch: Batch, states: Blocks) -> None:
        """Notes the states that a step writes; states: [R, blocks] of its rows."""
        if self._numbers is None:
            return
        if batch.block_writes is not None:
            self._known.difference_update(batch.block_writes[1].tolist())
        q_lens = np.diff(batch.query_start_loc).tolist()
        ends = batch.seq_lens.tolist()
        for blocks, q_len, end in zip(states.tolist(), q_lens, ends, strict=True):
            first = end - q_len + 1 if q_len <= self._numbers.num_slots else end
            for num_tokens in range(first, end + 1):
                self._known.update(self._numbers.after(blocks, num_tokens))

    def _copy(self, copies: npt.NDArray[np.int32]) -> None:
        for from_, to in copies.T.tolist():
            if from_ in self._known:
                self._known.add(to)
            else:
                self._known.discard(to)
