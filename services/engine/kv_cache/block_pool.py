"""Reference counts of the KV cache's blocks.

Hundreds of blocks hold a state, and are always taken and given back together. As a bundle they cost
the pool as little as one block.
"""

from collections import OrderedDict

from services.engine.request import BlockIds

NULL_BLOCK = 0
"""Pads block tables and takes the writes of dummy rows; no request holds it."""


class BlockPool:
    """Counts the holders of every block and keeps free blocks in order of reuse.

    A free block keeps its content, and can be shared again, until `take` returns it. So does a free
    bundle, as a whole: blocks of a bundle have no counts of their own.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 1, "a pool needs a block beside the null block"
        self._num_holders = [0] * num_blocks
        # In order of reuse; an OrderedDict removes from the middle in constant time. The first
        # block of a bundle has all of its blocks.
        self._free: OrderedDict[int, BlockIds | None]
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._num_free = num_blocks - 1
        self._spares: list[BlockIds] = []
        """Free bundles without content."""
        self._loose: list[int] = []
        """Free blocks of bundles that were taken in part."""

    @property
    def num_free(self) -> int:
        """Blocks without a holder."""
        return self._num_free

    def all(self) -> range:
        """Returns all blocks but the null block."""
        return range(1, len(self._num_holders))

    def is_free(self, block_id: int) -> bool:
        """Whether the block, or the bundle that begins with it, has no holder."""
        return block_id in self._free

    def take(self, count: int, *, as_bundle: bool = False) -> list[int]:
        """Returns `count` free blocks with one holder each.

        Blocks of bundles without content come first, then the least recently used. Of a bundle with
        content the first block is the first to be taken; the others lose theirs with it.

        as_bundle: whether they become a bundle, which leaves blocks of others in parts to single
            ones: else most bundles would end in parts.
        """
        assert count <= self._num_free, "more blocks were asked for than are free"
        self._num_free -= count
        taken: list[int] = []
        while num_left := count - len(taken):
            if (as_bundle and self._free) or not (self._loose or self._spares):
                block_id, bundle = self._free.popitem(last=False)
                taken += (block_id,) if bundle is None else bundle[:num_left]
                self._loose += () if bundle is None else bundle[num_left:]
                continue
            if not self._loose:
                self._loose = self._spares.pop().tolist()
            taken += self._loose[-num_left:]
            del self._loose[-num_left:]
        for block_id in taken:
            self._num_holders[block_id] = 1
        return taken

    def take_spare(self) -> "BlockIds | None":
        """Returns a free bundle without content, with one holder; None if there is none."""
        if not self._spares:
            return None
        bundle = self._spares.pop()
        self._num_free -= len(bundle)
        return bundle

    def share(self, block_id: int) -> bool:
        """Adds a holder to a block with content; returns whether it was free."""
        assert block_id != NULL_BLOCK, "the null block is not shared"
        self._num_holders[block_id] += 1
        if self._num_holders[block_id] > 1:
            return False
        del self._free[block_id]
        self._num_free -= 1
        return True

    def share_bundle(self, bundle: BlockIds) -> None:
        """Adds a holder to a free bundle with content."""
        del self._free[bundle[0]]
        self._num_free -= len(bundle)

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
        self._num_free += 1
        if not keep_long:
            self._free.move_to_end(block_id, last=False)
        return True

    def release_bundle(self, bundle: BlockIds, *, has_content: bool) -> None:
        """Removes the holder of blocks that were taken, which become free as one bundle.

        has_content: reuses them after all others; else before.
        """
        self._num_free += len(bundle)
        if has_content:
            self._free[bundle[0]] = bundle
        else:
            self._spares.append(bundle)

    def forget_bundle(self, bundle: BlockIds) -> None:
        """Makes a bundle the next to be reused, if it is free with content."""
        if self._free.get(bundle[0]) is bundle:
            del self._free[bundle[0]]
            self._spares.append(bundle)
