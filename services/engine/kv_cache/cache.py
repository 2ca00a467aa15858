"""The scheduler's records of the KV cache: blocks of requests and shared prefixes.

Workers run steps in the order of scheduling. So content counts as present once a step that computes
it is scheduled: later steps read it after the write, and the next holder of a freed block
overwrites it after all steps already sent. Within a step every layer writes all keys and values
before any query attends.

With G layer groups, a request's `block_ids` interleaves G block tables: entry i belongs to group i
% G and holds the tokens of block i // G of the sequence. An entry whose tokens have left its
group's window is the null block. A group with a span of n has n entries in turn for each block, all
of which hold it; its key is the last one's. Groups of states have others, `state_block_ids`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from services.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from services.engine.kv_cache.cache_groups import CacheGroups
from services.engine.kv_cache.prefix_index import (
    PrefixIndex,
    chain_keys,
    image_marks,
    root_key,
)
from services.engine.kv_cache.prefix_journal import BlockJournal, PrefixChanges, PrefixCursor
from services.engine.kv_cache.prefix_search import PrefixSearch
from services.engine.kv_cache.snapshots import StateCopies
from services.engine.kv_cache.state_blocks import StateBlocks
from services.engine.kv_cache.states import StateCache
from services.engine.request import BlockIds, Request, RequestStatus, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The computed beginning of a request's tokens.

    block_ids: its block table. num_tokens: its length. snapshot: the state after it, of a model
    with states. junction: tokens whose blocks are known though no snapshot is; 0 for none.
    """

    block_ids: list[int]
    num_tokens: int
    snapshot: Snapshot | None = None
    junction: int = 0


NO_PREFIX = Prefix(block_ids=[], num_tokens=0)


class KVCache:
    """Allocates and frees blocks of requests, and finds computed prefixes.

    It writes the requests' `block_ids`, `block_keys` and `num_indexed_blocks`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        groups: CacheGroups | None = None,
        state_blocks: StateBlocks | None = None,
        journal: BlockJournal | None = None,
    ) -> None:
        """Starts with all blocks free.

        Args:
            num_blocks: of the pool, the null block included.
            block_size: tokens in one block.
            enable_prefix_caching: whether requests find blocks by their content.
            groups: of the model's layers; by default one group without a window.
            state_blocks: numbers of a request's blocks of states; None of a model without any.
            journal: notes the blocks that can be found; by default one of its own.
        """
        self._pool = BlockPool(num_blocks)
        if groups is None:
            groups = CacheGroups(block_size=block_size, max_query_tokens=1)
        self._groups = groups
        self._is_plain = groups.is_plain
        # The first group bounds every match, so it alone has a journal to read.
        self._journal = journal or BlockJournal()
        self._indexes = [PrefixIndex(None if g else self._journal) for g in range(len(groups))]
        self.states: StateCache | None = None
        """The requests' states, of a model that has some."""
        if state_blocks is not None:
            self.states = StateCache(
                self._pool,
                blocks=state_blocks,
                block_size=block_size,
                is_caching=enable_prefix_caching,
            )
        self._block_size = block_size
        self._is_caching = enable_prefix_caching
        self._num_cached_blocks = 0
        snapshots = None if self.states is None else self.states.search(self.states.index.has)
        self._present = PrefixSearch(groups, [index.has for index in self._indexes], snapshots)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, with or without cached content."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that the prefix cache can still find."""
        num_of_snapshots = self.states.index.num_free_blocks if self.states is not None else 0
        return self._num_cached_blocks + num_of_snapshots

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the prefixes added and removed after a cursor; None starts over.

        They are prefixes of the first group, which bounds every match; none without one.
        """
        present = self._indexes[0].keys() if self._indexes else ()
        return self._journal.since(cursor, present, max_keys=max_keys)

    def match_prefix(self, request: Request) -> Prefix:
        """Returns the longest known prefix of the request's tokens.

        It never covers all tokens: the last one must be computed for its logits. A group with a
        window has only the blocks that the token after the prefix attends to. With states, it ends
        at a snapshot.
        """
        if not self._is_caching:
            return NO_PREFIX
        limit = (len(request.token_ids) - 1) // self._block_size
        self._extend_keys(request, limit)
        keys, groups, size = request.block_keys, self._groups, self._block_size
        if self.states is None and groups.is_plain:
            block_ids = self._indexes[0].find(islice(keys, limit))
            return Prefix(block_ids=block_ids, num_tokens=len(block_ids) * size)
        length, snapshot, junction = self._present.length(keys, limit), None, 0
        if self.states is not None:
            place = length * size // self.states.interval * self.states.interval
            length = self._present.snapshot_length(keys, length)
            snapshot = self.states.index.find(keys[length - 1]) if length else None
            junction = place if place > length * size and self._indexes else 0
        first = [groups.first_block(g, length * size) for g in range(len(groups))]
        block_ids = [
            (i >= first[g] and index.block_of(keys[groups.key_number(g, i)])) or NULL_BLOCK
            for i in range(length)
            for g, index in enumerate(self._indexes)
        ]
        return Prefix(
            block_ids=block_ids, num_tokens=length * size, snapshot=snapshot, junction=junction
        )

    def fits(self, prefix: Prefix, num_tokens: int) -> bool:
        """Whether the free blocks suffice for a request of `num_tokens` that shares `prefix`.

        They do if its state can only have the blocks of the snapshot, too.
        """
        return self._num_needed(prefix, num_tokens) <= self._pool.num_free

    def take_prefix(self, request: Request, prefix: Prefix, num_tokens: int) -> None:
        """Gives a request without blocks its matched prefix, and its state.

        num_tokens: for which it fits.
        """
        assert not request.block_ids, "a prefix comes before all other blocks"
        states, snapshot = self.states, prefix.snapshot
        copies = True
        if states is not None and snapshot is not None and states.index.is_free(snapshot):
            num_left = self._pool.num_free - self._num_needed(prefix, num_tokens)
            copies = num_left >= states.blocks.num_each
        for block_id in prefix.block_ids:
            if block_id != NULL_BLOCK:
                self._num_cached_blocks -= self._pool.share(block_id)
        request.block_ids.extend(prefix.block_ids)
        request.num_indexed_blocks = prefix.num_tokens // self._block_size
        if states is not None:
            own: Sequence[int] = ()
            # Before new blocks are taken, which may be the snapshot's.
            if snapshot is not None and copies:
                states.index.pin(snapshot)
            elif snapshot is not None:
                own = self._move_snapshot(states, snapshot)
            blocks = states.take(states.blocks.num_live - len(own), self._take)
            states.start(request, snapshot, blocks, own, prefix.junction)

    def save_state(self, request: Request) -> bool:
        """Makes a snapshot of a request's state before its next step; returns whether it did.

        It does if one is due. No request is preempted for it: without free blocks there is none.
        """
        states = self.states
        if states is None or (position := states.due_place(request)) is None:
            return False
        if self._pool.num_free < states.blocks.num_each:
            return False
        states.save(request, position, states.take(states.blocks.num_each, self._take))
        self.cache_full_blocks(request)
        return True

    def _num_needed(self, prefix: Prefix, num_tokens: int) -> int:
        """Returns the free blocks that a request of `num_tokens` takes."""
        num_needed = sum(map(self._pool.is_free, set(prefix.block_ids)))
        for group in range(len(self._groups)):
            table = set(prefix.block_ids[group :: len(self._groups)])
            num_held = len(table - {NULL_BLOCK})
            num_needed += max(0, self._groups.most_blocks(group, num_tokens) - num_held)
        return num_needed + (0 if self.states is None else self.states.blocks.num_live)

    def _take(self, count: int, *, as_bundle: bool = False) -> list[int]:
        """Takes free blocks, whose content can no longer be found."""
        new = self._pool.take(count, as_bundle=as_bundle)
        self._overwrite(new)
        return new

    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Forgets the content of blocks that the step being planned overwrites."""
        for index in self._indexes:
            self._num_cached_blocks -= index.forget_all(block_ids)
        if self.states is not None:
            self.states.index.forget_all(block_ids)

    def _move_snapshot(self, states: StateCache, snapshot: Snapshot) -> BlockIds:
        """Returns the blocks of a free snapshot, which become a request's state."""
        return states.index.take(snapshot)

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extends the request's blocks to its first `num_tokens` tokens.

        First frees the blocks that no later token attends to.

        Returns:
            The entries added to its table; None, with nothing added, if too few blocks are free.
        """
        table, first = request.block_ids, len(request.block_ids)
        if self._is_plain and 0 < num_tokens - first * self._block_size <= self._block_size:
            # Decodes mostly need one block.
            added = self._take(1) if self._pool.num_free else None
            table += added or ()
            return added
        self._leave_windows(request)
        entries = range(first, -(-num_tokens // self._block_size) * len(self._groups))
        if (num_new := sum(map(self._groups.begins_block, entries))) > self._pool.num_free:
            return None
        new = iter(self._take(num_new))
        for entry in entries:
            is_new = self._groups.begins_block(entry)
            table.append(next(new) if is_new else self._pool.hold(table[-len(self._groups)]))
        return table[first:]

    def cache_full_blocks(self, request: Request) -> None:
        """Adds the request's full, computed blocks to the prefix index."""
        if not self._is_caching:
            return
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_tokens // self._block_size
        if request.snapshots and self.states is not None:
            self._extend_keys(request, num_full)
            self.states.register(request, request.block_keys[:num_full])
        if num_full <= request.num_indexed_blocks:
            return
        self._extend_keys(request, num_full)
        first, request.num_indexed_blocks = request.num_indexed_blocks, num_full
        contents = self._journal.contents(request, first, num_full, self._block_size)
        entry = first * len(self._groups)
        for key, content in zip(request.block_keys[first:num_full], contents, strict=False):
            for index in self._indexes:
                is_whole = self._is_plain or self._groups.ends_block(entry)
                if is_whole and request.block_ids[entry] != NULL_BLOCK:
                    index.add(key, request.block_ids[entry], content)
                entry += 1

    def settle(self, requests: Sequence[Request]) -> None:
        """Drops what running requests keep of drafts that their last step rejected."""
        if self.states is None:
            return
        for request in requests:
            if request.snapshots and request.status is RequestStatus.RUNNING:
                self.states.settle(request)

    def free(self, request: Request) -> None:
        """Frees all blocks; full blocks can be found until they are reused.

        The last block of a chain is reused first: no block after a hole can be found.
        """
        self.cache_full_blocks(request)
        for block_id in reversed(request.block_ids):
            if block_id != NULL_BLOCK:
                self._release(block_id)
        request.block_ids.clear()
        request.num_indexed_blocks = 0
        if self.states is not None:
            self.states.free(request)

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Removes the blocks after a request's first `num_tokens` tokens from the prefix index.

        Undoes steps that were sent and not computed; the request may have ended.
        """
        first = num_tokens // self._block_size
        for key in request.block_keys[first:]:
            for index in self._indexes:
                block_id = index.forget_key(key)
                if block_id is not None and self._pool.is_free(block_id):
                    self._num_cached_blocks -= 1
        request.num_indexed_blocks = min(request.num_indexed_blocks, first)
        if self.states is not None:
            self.states.forget_from(request, num_tokens)

    def forget_all(self) -> None:
        """Forgets the content of all blocks, which no request holds: their memory is lost."""
        KVCache._overwrite(self, self._pool.all())

    def take_copies(self) -> StateCopies | None:
        """Returns the copies of states that belong to the step sent now; None for none."""
        return None if self.states is None else self.states.take_copies()

    def _release(self, block_id: int) -> None:
        is_findable = any(block_id in index for index in self._indexes)
        if self._pool.release(block_id, keep_long=is_findable):
            self._num_cached_blocks += is_findable

    def _leave_windows(self, request: Request) -> None:
        """Frees the blocks that no later token attends to."""
        table = request.block_ids
        # Steps in flight may reject all of their drafts.
        least = len(request.token_ids) + request.num_pending_tokens - 1
        position = min(request.num_computed_tokens, least)
        for group, window in enumerate(self._groups.windows):
            if window is None:
                continue
            first = self._groups.first_block(group, position)
            for entry in range((first - 1) * len(self._groups) + group, -1, -len(self._groups)):
                if table[entry] == NULL_BLOCK:
                    break  # earlier entries were freed before
                self._release(table[entry])
                table[entry] = NULL_BLOCK

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        keys, size = request.block_keys, self._block_size
        if len(keys) < num_blocks:
            parent = keys[-1] if keys else root_key(*request.cache_root)
            new_tokens = request.token_ids[len(keys) * size : num_blocks * size]
            if not request.images:
                keys.extend(chain_keys(parent, new_tokens, size))
                return
            marks = image_marks(request.images, size)
            first = {block - len(keys): mark for block, mark in marks.items()}
            keys.extend(chain_keys(parent, new_tokens, size, first))
