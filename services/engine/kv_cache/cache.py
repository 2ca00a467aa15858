"""The scheduler's records of the KV cache: blocks of requests and shared prefixes.

Workers run steps in the order of scheduling. So content counts as present once a step that computes
it is scheduled: later steps read it after the write, and the next holder of a freed block
overwrites it after all steps already sent. Within a step every layer writes all keys and values
before any query attends.

With G layer groups, a request's `block_ids` interleaves G block tables: entry i belongs to group i
% G and holds the tokens of block i // G of the sequence. An entry whose tokens have left its
group's window is the null block.
"""

from itertools import islice

from services.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from services.engine.kv_cache.cache_groups import CacheGroups
from services.engine.kv_cache.prefix_index import PrefixIndex, chain_keys, root_key
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor, PrefixJournal
from services.engine.request import Request


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
        journal: PrefixJournal | None = None,
    ) -> None:
        """Starts with all blocks free.

        Args:
            num_blocks: of the pool, the null block included.
            block_size: tokens in one block.
            enable_prefix_caching: whether requests find blocks by their content.
            groups: of the model's layers; by default one group without a window.
            journal: takes the changes of prefixes; by default one of its own.
        """
        self._pool = BlockPool(num_blocks)
        self._groups = groups or CacheGroups(block_size=block_size, max_query_tokens=1)
        # The first group bounds every match, so it alone has a journal to read.
        self._indexes = [
            PrefixIndex(None if group else journal) for group in range(len(self._groups.windows))
        ]
        self._block_size = block_size
        self._is_caching = enable_prefix_caching
        self._num_cached_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, with or without cached content."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that the prefix cache can still find."""
        return self._num_cached_blocks

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns the prefixes added and removed after a cursor; None starts over.

        They are prefixes of the first group, which bounds every match.
        """
        return self._indexes[0].changes_since(cursor, max_keys=max_keys)

    def match_prefix(self, request: Request) -> list[int]:
        """Returns the block table of the longest known prefix of the request's tokens.

        It never covers all tokens: the last one must be computed for its logits. A group with a
        window has only the blocks that the token after the prefix attends to.
        """
        if not self._is_caching:
            return []
        limit = (len(request.token_ids) - 1) // self._block_size
        self._extend_keys(request, limit)
        keys, groups = request.block_keys, self._groups
        if len(groups) == 1 and groups.windows[0] is None:
            return self._indexes[0].find(islice(keys, limit))
        length = self._prefix_length(keys, limit)
        first = [groups.first_block(g, length * self._block_size) for g in range(len(groups))]
        return [
            (i >= first[g] and index.block_of(keys[i])) or NULL_BLOCK
            for i in range(length)
            for g, index in enumerate(self._indexes)
        ]

    def fits(self, prefix: list[int], num_tokens: int) -> bool:
        """Whether the free blocks suffice for a request of `num_tokens` that shares `prefix`."""
        num_needed = sum(map(self._pool.is_free, prefix))
        for group in range(len(self._groups)):
            table = prefix[group :: len(self._groups)]
            num_held = len(table) - table.count(NULL_BLOCK)
            num_needed += max(0, self._groups.most_blocks(group, num_tokens) - num_held)
        return num_needed <= self._pool.num_free

    def take_prefix(self, request: Request, prefix: list[int]) -> None:
        """Gives a request without blocks its matched prefix."""
        assert not request.block_ids, "a prefix comes before all other blocks"
        for block_id in prefix:
            if block_id != NULL_BLOCK:
                self._num_cached_blocks -= self._pool.share(block_id)
        request.block_ids.extend(prefix)
        request.num_indexed_blocks = len(prefix) // len(self._groups)

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extends the request's blocks to its first `num_tokens` tokens.

        First frees the blocks that no later token attends to.

        Returns:
            The entries added to its table; None, with nothing added, if too few blocks are free.
        """
        self._leave_windows(request)
        num_blocks = -(-num_tokens // self._block_size)
        num_new = num_blocks * len(self._groups) - len(request.block_ids)
        if num_new > self._pool.num_free:
            return None
        new = self._pool.take(max(num_new, 0))
        for block_id in new:
            for index in self._indexes:  # at most one of them has the block
                self._num_cached_blocks -= index.forget(block_id)
        request.block_ids.extend(new)
        return new

    def cache_full_blocks(self, request: Request) -> None:
        """Adds the request's full, computed blocks to the prefix index."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_tokens // self._block_size
        if not self._is_caching or num_full <= request.num_indexed_blocks:
            return
        self._extend_keys(request, num_full)
        entry = request.num_indexed_blocks * len(self._groups)
        for key in request.block_keys[request.num_indexed_blocks : num_full]:
            for index in self._indexes:
                if request.block_ids[entry] != NULL_BLOCK:
                    index.add(key, request.block_ids[entry])
                entry += 1
        request.num_indexed_blocks = num_full

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

    def _prefix_length(self, keys: list[bytes], limit: int) -> int:
        """Returns the number of blocks of the longest prefix in all groups."""
        length = limit
        for index, window in zip(self._indexes, self._groups.windows, strict=True):
            if window is None:
                length = len(index.find(islice(keys, length)))
        while (hole := self._last_hole(keys, length)) is not None:
            length = hole
        return length

    def _last_hole(self, keys: list[bytes], length: int) -> int | None:
        """Returns the last uncached block that the token after `length` blocks reads, if any."""
        for group, index in enumerate(self._indexes):
            first = self._groups.first_block(group, length * self._block_size)
            for i in range(length - 1, first - 1, -1):
                if index.block_of(keys[i]) is None:
                    return i
        return None

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        keys, size = request.block_keys, self._block_size
        if len(keys) < num_blocks:
            parent = keys[-1] if keys else root_key(request.cache_salt)
            new_tokens = request.token_ids[len(keys) * size : num_blocks * size]
            keys.extend(chain_keys(parent, new_tokens, size))
