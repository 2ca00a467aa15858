"""The KV cache as the scheduler sees it: blocks for requests, and prefixes that they share.

Workers run steps strictly in the order in which they were scheduled. So content counts as present
as soon as the step that computes it is scheduled: a later step can only read it after it was
written, and a block given back now can only be overwritten by a step that runs after those sent.
Within one step, too, every layer writes all keys and values before any query attends.
"""

from itertools import islice

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.kv_cache.prefix_index import PrefixIndex, chain_keys, root_key
from services.engine.kv_cache.prefix_journal import PrefixChanges, PrefixCursor
from services.engine.request import Request


class KVCache:
    """Gives blocks to requests, takes them back, and finds prefixes computed before.

    It owns the requests' `block_ids`, `block_keys` and `num_indexed_blocks`.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = BlockPool(num_blocks)
        self._index = PrefixIndex()
        self._block_size = block_size
        self._is_caching = enable_prefix_caching
        self._num_cached_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, with or without cached content."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose content can still be found."""
        return self._num_cached_blocks

    def prefix_changes(self, cursor: PrefixCursor | None, *, max_keys: int) -> PrefixChanges:
        """Returns which prefixes came and went behind a cursor; None begins anew."""
        return self._index.changes_since(cursor, max_keys=max_keys)

    def match_prefix(self, request: Request) -> list[int]:
        """Returns the blocks that hold the longest known prefix of the request's tokens.

        It never covers all tokens: the last one must be computed for its logits.
        """
        if not self._is_caching:
            return []
        limit = (len(request.token_ids) - 1) // self._block_size
        self._extend_keys(request, limit)
        return self._index.find(islice(request.block_keys, limit))

    def fits(self, prefix: list[int], num_tokens: int) -> bool:
        """Whether a request of `num_tokens` that shares `prefix` would find enough free blocks."""
        num_revived = sum(map(self._pool.is_free, prefix))
        num_new = self._blocks_of(num_tokens) - len(prefix)
        return num_revived + num_new <= self._pool.num_free

    def take_prefix(self, request: Request, prefix: list[int]) -> None:
        """Lets a request without blocks hold the prefix that was matched for it."""
        assert not request.block_ids, "a prefix comes before all other blocks"
        for block_id in prefix:
            self._num_cached_blocks -= self._pool.share(block_id)
        request.block_ids.extend(prefix)
        request.num_indexed_blocks = len(prefix)

    def allocate(self, request: Request, num_tokens: int) -> list[int] | None:
        """Makes the request's blocks reach over its first `num_tokens` tokens.

        Returns:
            The blocks added, or None, and nothing changes, when too few are free.
        """
        num_new = self._blocks_of(num_tokens) - len(request.block_ids)
        if num_new > self._pool.num_free:
            return None
        new = self._pool.take(max(num_new, 0))
        for block_id in new:
            self._num_cached_blocks -= self._index.forget(block_id)
        request.block_ids.extend(new)
        return new

    def cache_full_blocks(self, request: Request) -> None:
        """Makes the request's blocks findable that are computed and whose tokens are all known."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        num_full = num_tokens // self._block_size
        if not self._is_caching or num_full <= request.num_indexed_blocks:
            return
        self._extend_keys(request, num_full)
        for i in range(request.num_indexed_blocks, num_full):
            self._index.add(request.block_keys[i], request.block_ids[i])
        request.num_indexed_blocks = num_full

    def free(self, request: Request) -> None:
        """Takes all blocks back; the full ones stay findable until they are reused.

        The last block of a chain is reused first, because nothing behind a hole can be found.
        """
        self.cache_full_blocks(request)
        for block_id in reversed(request.block_ids):
            is_findable = block_id in self._index
            if self._pool.release(block_id, keep_long=is_findable):
                self._num_cached_blocks += is_findable
        request.block_ids.clear()
        request.num_indexed_blocks = 0

    def forget_from(self, request: Request, num_tokens: int) -> None:
        """Makes nothing findable of what a request computed behind its first `num_tokens` tokens.

        For steps that were ordered and then not computed, whether or not the request still lives.
        """
        first = num_tokens // self._block_size
        for key in request.block_keys[first:]:
            block_id = self._index.forget_key(key)
            if block_id is not None and self._pool.is_free(block_id):
                self._num_cached_blocks -= 1
        request.num_indexed_blocks = min(request.num_indexed_blocks, first)

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Hashes the blocks up to `num_blocks` that have not been hashed before."""
        keys, size = request.block_keys, self._block_size
        if len(keys) < num_blocks:
            parent = keys[-1] if keys else root_key(request.cache_salt)
            new_tokens = request.token_ids[len(keys) * size : num_blocks * size]
            keys.extend(chain_keys(parent, new_tokens, size))

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
