"""Reference counts of the KV cache's blocks."""

from collections import OrderedDict

NULL_BLOCK = 0
"""Pads block tables and takes the writes of dummy rows; no request holds it."""


class BlockPool:
    """Counts the holders of every block and keeps free blocks in order of reuse.

    A free block keeps its content, and can be shared again, until `take` returns it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 1, "a pool needs a block beside the null block"
        self._num_holders = [0] * num_blocks
        # In order of reuse; an OrderedDict removes from the middle in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return len(self._free)

    def all(self) -> range:
        """Returns all blocks but the null block."""
        return range(1, len(self._num_holders))

    def is_free(self, block_id: int) -> bool:
        """Whether the block has no holder."""
        return block_id in self._free

    def take(self, count: int) -> list[int]:
        """Returns `count` free blocks, least recently used first, with one holder each."""
        assert count <= len(self._free), "more blocks were asked for than are free"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._num_holders[block_id] = 1
        return taken

    def share(self, block_id: int) -> bool:
        """Adds a holder to a block with content; returns whether it was free."""
        assert block_id != NULL_BLOCK, "the null block is not shared"
        self._num_holders[block_id] += 1
        if self._num_holders[block_id] > 1:
            return False
        del self._free[block_id]
        return True

    def hold(self, block_id: int) -> int:
        """Adds a holder to a block that has one; returns the block."""
        assert self._num_holders[block_id] > 0, "the block has no holder"
        self._num_holders[block_id] += 1
        return block_id

    def release(self, block_id: int, *, keep_long: bool) -> bool:
        """Removes a holder; returns whether the block became free.

        Args:
            block_id: a block with a holder.
            keep_long: True reuses the block after all others, False before all others.
        """
        assert self._num_holders[block_id] > 0, "a block was released more often than held"
        self._num_holders[block_id] -= 1
        if self._num_holders[block_id]:
            return False
        self._free[block_id] = None
        if not keep_long:
            self._free.move_to_end(block_id, last=False)
        return True

    def reuse_first(self, block_id: int) -> None:
        """Makes a block the next to be reused, if it is free."""
        if block_id in self._free:
            self._free.move_to_end(block_id, last=False)
