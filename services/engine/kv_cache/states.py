"""The live states of requests, and when snapshots of them are made.

A snapshot after n tokens is worth keeping where other requests may go on: before the end of a
prompt, where the prompts of two requests part, every few thousand tokens of a long prompt, and at
the newest place of an output. A step's chunk of a prompt ends there, and the next step of the
request begins with a copy.
"""

from collections.abc import Sequence

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.kv_cache.snapshots import (
    LONG_PROMPT,
    SnapshotIndex,
    StateCopies,
    snapshot_interval,
)
from services.engine.request import Request, Snapshot


class StateCache:
    """Gives requests their state's blocks, and makes and finds snapshots.

    It writes the requests' `state_block_ids` and `snapshots`. Blocks that it takes from the pool
    are reported to `KVCache`, whose other content they had.
    """

    def __init__(
        self, pool: BlockPool, *, num_blocks_each: int, block_size: int, is_caching: bool
    ) -> None:
        """Starts without states.

        Args:
            pool: of all blocks.
            num_blocks_each: blocks of one state.
            block_size: tokens in one block.
            is_caching: whether snapshots are made.
        """
        self.num_blocks_each = num_blocks_each
        self.index = SnapshotIndex(pool)
        self.interval = snapshot_interval(block_size)
        self.is_caching = is_caching
        self._pool = pool
        self._block_size = block_size
        self._copies = StateCopies()

    def find(self, keys: Sequence[bytes], num_tokens: int) -> Snapshot | None:
        """Returns the snapshot after the most of a request's first `num_tokens` tokens."""
        last = num_tokens - num_tokens % self.interval
        for position in range(last, 0, -self.interval):
            snapshot = self.index.find(keys[position // self._block_size - 1])
            if snapshot is not None:
                return snapshot
        return None

    def start(
        self, request: Request, snapshot: Snapshot | None, blocks: list[int] | None, junction: int
    ) -> None:
        """Gives a request its live state.

        Args:
            request: one without a state.
            snapshot: where it starts from, pinned if it is copied; None starts from no tokens.
            blocks: new blocks for the state; None takes those of the snapshot, which must be free.
            junction: tokens after which a snapshot would have let it start later; 0 for none.
        """
        assert not request.state_block_ids, "a state comes before all tokens"
        request.junction = junction
        request.last_snapshot = 0 if snapshot is None else snapshot.num_tokens
        if blocks is None:
            assert snapshot is not None, "without a snapshot a state needs new blocks"
            request.state_block_ids = self.index.take(snapshot)
            return
        request.state_block_ids = blocks
        if snapshot is not None:
            self._copies.restored.extend(zip(snapshot.block_ids, blocks, strict=True))

    def is_due(self, request: Request) -> bool:
        """Whether a snapshot of the request's state is made before its next step."""
        position = request.num_computed_tokens
        if not self.is_caching or position % self.interval or position <= request.last_snapshot:
            return False
        if position > request.num_prompt_tokens:
            return True
        return (
            position == request.junction
            or position == self.last_place(request.num_prompt_tokens)
            or position == self.last_place(len(request.token_ids))
            or position - request.last_snapshot >= LONG_PROMPT
        )

    def save(self, request: Request, blocks: list[int]) -> None:
        """Makes a snapshot of a request's state in new blocks, before the step being planned."""
        position = request.num_computed_tokens
        snapshot = Snapshot(num_tokens=position, block_ids=blocks)
        self._copies.saved.extend(zip(request.state_block_ids, blocks, strict=True))
        self.index.pin(snapshot)  # no other content takes its blocks before the step is sent
        if request.last_snapshot > request.num_prompt_tokens:
            self._forget_at(request, request.last_snapshot)
        request.last_snapshot = position
        request.snapshots.append(snapshot)

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
            else:
                waiting.append(snapshot)
        request.snapshots = waiting

    def free(self, request: Request) -> None:
        """Takes back a request's state, and the snapshots that cannot be found."""
        for snapshot in request.snapshots:
            self.index.drop(snapshot)
        for block_id in reversed(request.state_block_ids):
            self._pool.release(block_id, keep_long=False)
        request.snapshots, request.state_block_ids = [], []

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Drops snapshots after `num_tokens` or more tokens, which steps did not make."""
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

    def _forget_at(self, request: Request, position: int) -> None:
        place = position // self._block_size - 1
        if place < len(request.block_keys):
            self.index.forget(request.block_keys[place])
