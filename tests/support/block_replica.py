"""A subscriber's copy of the cached blocks of one rank."""

from services.engine.kv_cache.block_events import BlockEvent, BlockEvents, Cleared, Stored, Tier
from services.engine.kv_cache.prefix_index import chain_keys, root_key


class BlockReplica:
    """Applies a snapshot and the changes after it, and refuses what a subscriber cannot."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, Tier], Stored] = {}
        self.number: int | None = None
        self.num_snapshots = 0

    def read(self, record: BlockEvents) -> None:
        """Reads all that is new."""
        batches = None if self.number is None else record.since(self.number)
        if batches is None:
            self.number, stored = record.snapshot()
            self.blocks.clear()
            self.num_snapshots += 1
            self.apply(stored)
            return
        for batch in batches:
            assert batch.number == self.number + 1, "a number is missing"
            self.number = batch.number
            self.apply(batch.events)

    def apply(self, events) -> None:
        """Applies events in their order."""
        for event in events:
            self._apply(event)

    def _apply(self, event: BlockEvent) -> None:
        if isinstance(event, Cleared):
            self.blocks.clear()
        elif isinstance(event, Stored):
            assert (event.key, event.tier) not in self.blocks, "stored twice"
            self.blocks[event.key, event.tier] = event
        else:
            del self.blocks[event.key, event.tier]

    def keys(self, tier: Tier = Tier.GPU) -> set[bytes]:
        """Keys of the blocks in a tier."""
        return {key for key, held_in in self.blocks if held_in is tier}

    def check_contents(self, block_size: int) -> None:
        """Checks that tokens and parents have the keys, as an unsalted prompt has them."""
        for block in self.blocks.values():
            parent, data, _ = block.content
            if data is not None:
                tokens = list(memoryview(data).cast("i"))
                assert len(tokens) == block_size
                start = root_key("") if parent is None else parent
                assert chain_keys(start, tokens, block_size) == [block.key]
