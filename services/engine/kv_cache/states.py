"""The live states of requests, and when snapshots of them are made.

A snapshot after n tokens is worth keeping where other requests may go on: before the end of a
prompt, where the prompts of two requests part, every few thousand tokens of a long prompt, and at
the newest place of an output. A step's chunk of a prompt ends there, and the next step of the
request begins with a copy.

With drafts a step passes such a place somewhere among its tokens, and the next one may be planned
before it is known which of them hold. A slot has the state after each, so it is copied all the
same; `settle` drops the copy if a draft before it was rejected.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.kv_cache.prefix_search import SnapshotSearch
from services.engine.kv_cache.snapshots import (
    LONG_PROMPT,
    SnapshotIndex,
    StateCopies,
    snapshot_interval,
)
from services.engine.kv_cache.state_blocks import StateBlocks
from services.engine.request import BlockIds, Request, Snapshot


class StateCache:
    """Gives requests their state's blocks, and makes and finds snapshots.

    It writes the requests' `state_block_ids` and `snapshots`. Blocks that it takes from the pool
    are reported to `KVCache`, whose other content they had.
    """

    def __init__(
        self, pool: BlockPool, *, blocks: StateBlocks, block_size: int, is_caching: bool
    ) -> None:
        """Starts without states.

        Args:
            pool: of all blocks.
            blocks: numbers of a request's.
            block_size: tokens in one block.
            is_caching: whether snapshots are made.
        """
        self.blocks = blocks
        self.index = SnapshotIndex(pool)
        self.interval = snapshot_interval(block_size)
        self.is_caching = is_caching
        self.on_spare: Callable[[Iterable[int]], None] | None = None
        """Called with blocks of states that are gone when others take them; None for none."""
        self._pool = pool
        self._block_size = block_size
        self._copies = StateCopies()

    def take(self, count: int, take_others: Callable[..., list[int]]) -> BlockIds:
        """Takes blocks for states, first those of states that are gone.

        Args:
            count: of the blocks, a multiple of those of a state.
            take_others: takes other free blocks, as `BlockPool.take` does.
        """
        taken = array("i")
        while len(taken) < count and (blocks := self._pool.take_spare()) is not None:
            taken.extend(blocks)
        if self.on_spare is not None:
            self.on_spare(taken)
        taken.extend(take_others(count - len(taken), as_bundle=True))
        return taken

    def search(self, is_present: Callable[[bytes], bool]) -> SnapshotSearch:
        """Returns a search of snapshots, which are present after some keys."""
        return SnapshotSearch(is_present, self.interval)

    def start(
        self,
        request: Request,
        snapshot: Snapshot | None,
        blocks: BlockIds,
        own: Sequence[int],
        junction: int,
    ) -> None:
        """Gives a request its live state.

        Args:
            request: one without a state.
            snapshot: where it starts from, pinned if it is copied; None starts from no tokens.
            blocks: new blocks for all states, or for all but that of the snapshot.
            own: blocks of the snapshot, if it gives them.
            junction: tokens after which a snapshot would have let it start later; 0 for none.
        """
        assert not request.state_block_ids, "a state comes before all tokens"
        request.junction = junction
        request.last_snapshot = 0 if snapshot is None else snapshot.num_tokens
        if own:
            assert snapshot is not None, "without a snapshot a state needs new blocks"
            request.state_block_ids = self.blocks.arranged(own, blocks, snapshot.num_tokens)
            return
        request.state_block_ids = blocks
        if snapshot is not None:
            self._copies.restored_from.extend(snapshot.block_ids)
            self._copies.restored_to.extend(self.blocks.after(blocks, snapshot.num_tokens))

    def due_place(self, request: Request) -> int | None:
        """Returns after how many tokens a request's state is saved before its next step, if any.

        Slots have the states after all drafts of its last step, whether these hold or not.
        """
        last = request.num_computed_tokens
        is_known = not request.num_pending_tokens
        first = last - (request.num_held_drafts if is_known else request.num_pending_drafts)
        position = last - last % self.interval
        if not self.is_caching or not max(first, request.last_snapshot + 1) <= position:
            return None
        is_due = (
            position > request.num_prompt_tokens
            or position == request.junction
            or position == self.last_place(request.num_prompt_tokens)
            or position == self.last_place(len(request.token_ids))
            or position - request.last_snapshot >= LONG_PROMPT
        )
        return position if is_due else None

    def save(self, request: Request, position: int, blocks: BlockIds) -> None:
        """Makes a snapshot of a request's state in new blocks, before the step being planned."""
        snapshot = Snapshot(num_tokens=position, block_ids=blocks)
        self._copies.saved_from.extend(self.blocks.after(request.state_block_ids, position))
        self._copies.saved_to.extend(blocks)
        self.index.pin(snapshot)  # no other content takes its blocks before the step is sent
        request.last_snapshot = position
        request.snapshots.append(snapshot)

    def settle(self, request: Request) -> None:
        """Drops snapshots of states that rejected drafts entered, once it is known which held."""
        num_held = len(request.token_ids) - 1
        for snapshot in request.snapshots:
            if snapshot.num_tokens > num_held:
                request.last_snapshot = snapshot.num_tokens - self.interval  # it is due again
                self.index.drop(snapshot)
        request.snapshots = [each for each in request.snapshots if each.num_tokens <= num_held]

    def cut(self, request: Request, q_len: int) -> int:
        """Returns how many of a request's next tokens a step computes, to end at a snapshot."""
        if not self.is_caching or q_len <= 1:
            return q_len
        start = request.num_computed_tokens
        end, num_known = start + q_len, len(request.token_ids)
        places = (
            request.junction,
            self.last_place(request.num_prompt_tokens),
            self.last_place(num_known),
        )
        stops = [place for place in places if start < place < end]
        if stops:
            return min(stops) - start
        aligned = end - end % self.interval
        is_long = aligned - request.last_snapshot >= LONG_PROMPT
        return aligned - start if end < num_known and is_long and aligned > start else q_len

    def register(self, request: Request, keys: Sequence[bytes]) -> None:
        """Makes those snapshots of a request known whose tokens are."""
        waiting = []
        for snapshot in request.snapshots:
            place = snapshot.num_tokens // self._block_size - 1
            if place < len(keys):
                self.index.add(keys[place], snapshot)
                # The newest place of an output takes over from the one before.
                before = snapshot.num_tokens - self.interval
                if before > request.num_prompt_tokens:
                    self.index.forget(keys[before // self._block_size - 1])
            else:
                waiting.append(snapshot)
        request.snapshots = waiting

    def free(self, request: Request) -> None:
        """Takes back a request's state, and the snapshots that cannot be found."""
        for snapshot in request.snapshots:
            self.index.drop(snapshot)
        blocks, size = request.state_block_ids, self.blocks.num_each
        for first in range(0, len(blocks), size):
            self._pool.release_bundle(blocks[first : first + size], has_content=False)
        request.snapshots, request.state_block_ids = [], array("i")

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Drops snapshots that steps did not make, whose first token was number `num_tokens`.

        They may be of states after drafts before it.
        """
        num_tokens -= self.blocks.num_slots - 1
        first = max(0, num_tokens // self._block_size - 1)
        for key in request.block_keys[first:]:
            self.index.forget(key)
        for snapshot in request.snapshots:
            if snapshot.num_tokens >= num_tokens:
                self.index.drop(snapshot)
        request.snapshots = [each for each in request.snapshots if each.num_tokens < num_tokens]

    def take_copies(self) -> StateCopies:
        """Returns the copies of the step that is sent now."""
        copies, self._copies = self._copies, StateCopies()
        self.index.unpin_all()
        return copies

    def last_place(self, num_tokens: int) -> int:
        """Returns the last place for a snapshot before a token that is computed in any case."""
        return (num_tokens - 1) // self.interval * self.interval
