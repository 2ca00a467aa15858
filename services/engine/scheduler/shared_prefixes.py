"""Finds the leading blocks that running requests share, so that attention reads them once a step.

Prefixes form a tree: of a system prompt, then of a repository, then of a conversation. A request is
in up to MOST_NESTED prefixes of a step, one inside the other, of which each has the blocks after
the one before. Those are chosen that save most reads together.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from services.engine.batch import (
    AttentionMetadata,
    BatchDescriptor,
    Int32Array,
    SharedPrefixes,
    pack_int32,
    read_int32,
)
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.request import Request
from services.engine.scheduler.holdings import Holdings

MOST_NESTED = 3
"""Most prefixes of a request."""
MOST_TILES = 64
"""Tiles of a step's plan, which the prefixes of a step share."""
TILE_QUERIES = 16
"""Most queries of a tile, which all are in one prefix. The model has the same three numbers."""
_MOST_LEVELS = 8
"""Levels of the tree that are looked at."""
_SEARCHED_IN_A_STEP = 32
"""Running requests for each step between two searches; one of 1,024 requests takes 1 to 8 ms."""


class Prefix(NamedTuple):
    """Blocks [start, end) of the tables of requests, which share them and all before."""

    requests: list[Request]
    start: int
    end: int

    @property
    def num_saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.requests) - 1) * (self.end - self.start)


class _Branch(NamedTuple):
    """Requests with the same first blocks, `end` of them, and branches with more."""

    requests: list[Request]
    end: int
    below: list["_Branch"]


def pays(num_requests: int, num_tokens: int, *, least_saved: int) -> bool:
    """Returns whether attention reads a prefix once for all its requests.

    The kernel of shared keys, and what it leaves for the others, take as long as reading tens of
    thousands of keys: `python -m tests.bench.shared_prefixes` measures it.

    Args:
        num_requests: requests that share the prefix and decode.
        num_tokens: its length, less that of the prefix before it.
        least_saved: --shared-prefix-tokens.
    """
    saved = (num_requests - 1) * num_tokens
    return num_requests >= LEAST_SHARING_REQUESTS and saved >= least_saved


class SharedPrefixFinder:
    """Adds shared prefixes to steps; looks for them when requests have started or ended.

    Tables grow at their ends, so a prefix lasts as long as its requests run.
    """

    def __init__(self, limits: StepLimits) -> None:
        """Starts without prefixes."""
        self._least_saved = limits.shared_prefix_tokens or 0
        self._block_size = limits.block_size
        self._num_groups = limits.num_groups
        self._most_queries = limits.decode_q_len
        # Of steps in flight it is not known how many drafts hold.
        self._num_uncertain = (limits.num_stages + 1) * limits.num_speculative_tokens
        self._index_of_row = np.empty(limits.max_num_seqs, np.int32)
        self._num_moves = -1
        self._next_search = 0
        self._rows: list[tuple[Int32Array, int]] = []
        """Rows of each prefix of the last search, and its tokens; shorter ones first."""
        self._is_member = np.ones(limits.max_num_seqs, np.bool_)
        """Rows whose requests have run since the last search."""
        self._last: tuple[bytes, bytes, SharedPrefixes] | None = None
        """Rows and queries of the last step with prefixes, which the next one mostly repeats."""

    def order(self, descriptor: BatchDescriptor, holdings: Holdings) -> None:
        """Adds the prefixes that requests of a step share, the greatest saving first.

        The step then runs a graph that reads them, if there is one.
        """
        if not self._least_saved:
            return
        self._follow(holdings, descriptor.step_id)
        if not self._rows:
            return
        attention = descriptor.attn_metadata
        if self._last is None or self._last[:2] != (attention.row_ids, attention.query_start_loc):
            prefixes = self._prefixes_of(attention)
            self._last = attention.row_ids, attention.query_start_loc, prefixes
        if self._last[2].counts:
            attention.shared_prefixes.CopyFrom(self._last[2])

    def _follow(self, holdings: Holdings, step_id: int) -> None:
        """Takes note of requests that stopped, and searches if some have started or stopped."""
        if holdings.left_rows:
            self._is_member[list(holdings.left_rows)] = False
            holdings.left_rows.clear()
            self._last = None
        if holdings.num_moves == self._num_moves or step_id < self._next_search:
            return
        self._num_moves = holdings.num_moves
        self._next_search = step_id + len(holdings.running) // _SEARCHED_IN_A_STEP
        self._rows = [
            (
                np.array([each.row for each in prefix.requests], np.int32),
                prefix.end * self._block_size,
            )
            for prefix in _fitting(self.find(holdings.running), self._most_queries)
        ]
        self._is_member.fill(True)
        self._last = None

    def _prefixes_of(self, attention: AttentionMetadata) -> SharedPrefixes:
        """Returns the prefixes of a step's decodes that pay."""
        row_ids, q_lens = (
            read_int32(attention.row_ids),
            np.diff(read_int32(attention.query_start_loc)),
        )
        num_cached = read_int32(attention.seq_lens) - q_lens - self._num_uncertain
        is_decode = (q_lens > 0) & (q_lens <= self._most_queries)
        is_decode &= self._is_member[row_ids]
        index_of_row = self._index_of_row
        index_of_row.fill(-1)
        index_of_row[row_ids[is_decode]] = np.flatnonzero(is_decode)
        num_covered = np.zeros(len(row_ids), np.int32)
        members, counts, lengths = [], [], []
        for rows, num_tokens in self._rows:
            indices = index_of_row[rows]
            indices = indices[indices >= 0]
            indices = indices[num_cached[indices] >= num_tokens]
            num_before = int(num_covered[indices[0]]) if len(indices) else 0
            if pays(len(indices), num_tokens - num_before, least_saved=self._least_saved):
                num_covered[indices] = num_tokens
                members.append(indices)
                counts.append(len(indices))
                lengths.append(num_tokens // self._block_size)
        return SharedPrefixes(
            requests=pack_int32(np.concatenate(members)) if members else b"",
            counts=pack_int32(counts),
            num_blocks=pack_int32(lengths),
        )

    def find(self, requests: Sequence[Request]) -> list[Prefix]:
        """Returns prefixes, nested in one another, which save most reads together.

        A block id stands for all tokens up to it: the prefix index shares no block between requests
        that differ before it.
        """
        branches = self._branches(requests, 0, _MOST_LEVELS)
        return self._choose(branches, 0, MOST_NESTED)

    def _branches(
        self, requests: Sequence[Request], num_blocks: int, num_levels: int
    ) -> list[_Branch]:
        """Returns the branches of requests that share `num_blocks`, each of more blocks."""
        if not num_levels:
            return []
        found: dict[int, list[Request]] = {}
        entry = num_blocks * self._num_groups
        for request in requests:
            if entry < len(request.block_ids):
                found.setdefault(request.block_ids[entry], []).append(request)
        branches = []
        for each in found.values():
            if len(each) >= LEAST_SHARING_REQUESTS:
                end = self._num_common(each, num_blocks + 1)
                branches.append(_Branch(each, end, self._branches(each, end, num_levels - 1)))
        return branches

    def _choose(self, branches: Iterable[_Branch], start: int, num_left: int) -> list[Prefix]:
        """Returns the prefixes of branches that save most.

        start: blocks of the prefix that all of their requests are in. num_left: more prefixes that
        a request may have.
        """
        chosen: list[Prefix] = []
        for branch in branches if num_left else ():
            here = Prefix(branch.requests, start, branch.end)
            without = self._choose(branch.below, start, num_left)
            num_tokens = (branch.end - start) * self._block_size
            if not pays(len(branch.requests), num_tokens, least_saved=self._least_saved):
                chosen += without
                continue
            with_it = [here, *self._choose(branch.below, branch.end, num_left - 1)]
            chosen += max(with_it, without, key=_num_saved)
        return chosen

    def _num_common(self, requests: Sequence[Request], least: int) -> int:
        """Returns how many leading blocks requests share, at least `least`."""
        tables, num_groups = [request.block_ids for request in requests], self._num_groups
        most = min(map(len, tables)) // num_groups
        while least < most:
            middle = (least + most + 1) // 2
            entry = (middle - 1) * num_groups
            if len({table[entry] for table in tables}) == 1:
                least = middle
            else:
                most = middle - 1
        return least


def _num_saved(prefixes: Iterable[Prefix]) -> int:
    return sum(each.num_saved for each in prefixes)


def _fitting(prefixes: Sequence[Prefix], num_queries: int) -> list[Prefix]:
    """Returns the prefixes that fit a plan together, shorter ones first.

    If not all do, the plan has the prefixes that save most, or each request has its longest prefix
    alone: what saves more. num_queries: most of a request.
    """
    if sum(_num_tiles(each, num_queries) for each in prefixes) <= MOST_TILES:
        return sorted(prefixes, key=_end)
    ways = (_filled(each, num_queries) for each in (prefixes, _apart(prefixes)))
    return max(ways, key=_num_saved)


def _filled(prefixes: Sequence[Prefix], num_queries: int) -> list[Prefix]:
    """Fills a plan with the prefixes that save most for each tile, shorter ones first.

    Requests of a prefix that lose the one before it read its blocks in this one. Of a prefix that
    does not fit, as many requests share it as there is room for.
    """
    num_left, fitting = MOST_TILES, list[Prefix]()
    for prefix in sorted(
        prefixes, key=lambda each: each.num_saved / _num_tiles(each, num_queries), reverse=True
    ):
        fits = prefix
        if _num_tiles(prefix, num_queries) > num_left:
            longer = sorted((each for each in fitting if each.start >= prefix.end), key=_end)
            # In each level one of these may be cut in two parts, which take another tile.
            num_left -= (MOST_NESTED - 1) * bool(longer)
            most = max(0, num_left) * TILE_QUERIES // num_queries
            fits = prefix._replace(requests=_together(prefix.requests, longer)[:most])
        if len(fits.requests) >= LEAST_SHARING_REQUESTS:
            num_left -= _num_tiles(fits, num_queries)
            fitting.append(fits)
    return _parts(sorted(fitting, key=_end))


def _apart(prefixes: Iterable[Prefix]) -> list[Prefix]:
    """Returns prefixes from the first block on, of which each request has its longest."""
    apart, taken = [], set[int]()
    for prefix in sorted(prefixes, key=_end, reverse=True):
        requests = [each for each in prefix.requests if id(each) not in taken]
        if len(requests) >= LEAST_SHARING_REQUESTS:
            taken.update(map(id, requests))
            apart.append(Prefix(requests, 0, prefix.end))
    return apart


def _together(requests: Sequence[Request], prefixes: Iterable[Prefix]) -> list[Request]:
    """Returns requests in an order in which the members of each prefix come together, and first."""
    numbers: dict[int, list[int]] = {id(each): [] for each in requests}
    for number, prefix in enumerate(prefixes):
        for each in prefix.requests:
            numbers.get(id(each), []).append(number)
    return sorted(requests, key=lambda each: numbers[id(each)], reverse=True)


def _parts(prefixes: Iterable[Prefix]) -> list[Prefix]:
    """Returns prefixes, shorter ones first, each cut by the last part before of its requests."""
    parts, last = list[Prefix](), dict[int, int]()
    for prefix in prefixes:
        by_last: dict[int, list[Request]] = {}
        for each in prefix.requests:
            by_last.setdefault(last.get(id(each), -1), []).append(each)
        for number, requests in by_last.items():
            start = 0 if number < 0 else parts[number].end
            last |= dict.fromkeys(map(id, requests), len(parts))
            parts.append(Prefix(requests, start, prefix.end))
    return parts


def _num_tiles(prefix: Prefix, num_queries: int) -> int:
    return -(-len(prefix.requests) * num_queries // TILE_QUERIES)


def _end(prefix: Prefix) -> int:
    return prefix.end
