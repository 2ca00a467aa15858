"""The blocks of a request's states, in the order of its row in the block table."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.engine.request import BlockIds


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlocks:
    """Numbers of a request's blocks of states, group after group, slot after slot.

    num_groups: groups of layers that keep states. num_slots: states of a request in each; the one
    after n tokens is in slot n modulo their number. num_pages: blocks of one.
    """

    num_groups: int
    num_slots: int = 1
    num_pages: int

    @property
    def num_each(self) -> int:
        """Blocks of one state of all groups, as in a snapshot."""
        return self.num_groups * self.num_pages

    @property
    def num_live(self) -> int:
        """Blocks of a running request."""
        return self.num_each * self.num_slots

    def after(self, block_ids: BlockIds, num_tokens: int) -> BlockIds:
        """Returns the blocks of a request's state after as many tokens, of all of its blocks."""
        if self.num_slots == 1:
            return block_ids
        return array("i", [block_ids[entry] for entry in self._entries(num_tokens)])

    def arranged(self, after: Sequence[int], others: Sequence[int], num_tokens: int) -> BlockIds:
        """Returns a request's blocks: those of its state after `num_tokens`, and of other slots."""
        block_ids = array("i", bytes(4 * self.num_live))
        entries = self._entries(num_tokens)
        for entry, block_id in zip(entries, after, strict=True):
            block_ids[entry] = block_id
        left = iter(others)
        taken = set(entries)
        for entry in range(self.num_live):
            if entry not in taken:
                [block_ids[entry]] = islice(left, 1)
        return block_ids

    def _entries(self, num_tokens: int) -> list[int]:
        slot = num_tokens % self.num_slots
        return [
            (group * self.num_slots + slot) * self.num_pages + page
            for group in range(self.num_groups)
            for page in range(self.num_pages)
        ]
