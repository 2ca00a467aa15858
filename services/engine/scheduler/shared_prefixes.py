"""Finds the leading blocks that running requests share, so that attention reads them once a step.

Prefixes form a tree: of a system prompt, then of a repository, then of a conversation. A request is
in one prefix of a step, and those are chosen that save most reads together.
"""

from collections.abc import Sequence
from typing import TypeAlias

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
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.holdings import Holdings

_MOST_LEVELS = 8
"""Levels of the tree that are looked at."""
_MOST_PREFIXES = 32
"""Most prefixes of a step, as many as the worker's plan has tiles."""
_SEARCHED_IN_A_STEP = 32
"""Running requests for each step between two searches; one of 1,024 requests takes 1 to 8 ms."""

Prefix: TypeAlias = tuple[list[Request], int]
"""Requests, and the leading blocks that they share."""


def pays(num_requests: int, num_tokens: int, *, least_saved: int) -> bool:
    """Returns whether attention reads a prefix once for all its requests.

    The kernel of shared keys, and what it leaves for the others, take as long as reading tens of
    thousands of keys: `python -m tests.bench.shared_prefixes` measures it.

    Args:
        num_requests: requests that share the prefix and decode.
        num_tokens: its length.
        least_saved: --shared-prefix-tokens.
    """
    saved = (num_requests - 1) * num_tokens
    return num_requests >= LEAST_SHARING_REQUESTS and saved >= least_saved


class SharedPrefixFinder:
    """Adds shared prefixes to steps; looks for them when requests have started or ended.

    Tables grow at their ends, so a prefix lasts as long as its requests run.
    """

    def __init__(self, limits: StepLimits, dispatcher: GraphDispatcher | None = None) -> None:
        """Starts without prefixes; dispatcher: knows the graphs of steps that share some."""
        self._dispatcher = dispatcher or GraphDispatcher()
        self._least_saved = limits.shared_prefix_tokens or 0
        self._block_size = limits.block_size
        self._num_groups = limits.num_groups
        self._index_of_row = np.empty(limits.max_num_seqs, np.int32)
        self._num_moves = -1
        self._next_search = 0
        self._rows: list[tuple[Int32Array, int]] = []
        """Rows of each prefix of the last search, the greatest saving first, and its tokens."""
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
            self._dispatcher.order_sharing(descriptor)

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
        found = sorted(self.find(holdings.running), key=_num_saved, reverse=True)
        self._rows = [
            (np.array([each.row for each in requests], np.int32), num_blocks * self._block_size)
            for requests, num_blocks in found[:_MOST_PREFIXES]
        ]
        self._is_member.fill(True)
        self._last = None

    def _prefixes_of(self, attention: AttentionMetadata) -> SharedPrefixes:
        """Returns the prefixes of a step's single tokens that pay."""
        row_ids, seq_lens = read_int32(attention.row_ids), read_int32(attention.seq_lens)
        is_single = np.diff(read_int32(attention.query_start_loc)) == 1
        is_single &= self._is_member[row_ids]
        index_of_row = self._index_of_row
        index_of_row.fill(-1)
        index_of_row[row_ids[is_single]] = np.flatnonzero(is_single)
        members, counts, lengths = [], [], []
        for rows, num_tokens in self._rows:
            indices = index_of_row[rows]
            indices = indices[indices >= 0]
            indices = indices[seq_lens[indices] > num_tokens]
            if pays(len(indices), num_tokens, least_saved=self._least_saved):
                members.append(indices)
                counts.append(len(indices))
                lengths.append(num_tokens // self._block_size)
        return SharedPrefixes(
            requests=pack_int32(np.concatenate(members)) if members else b"",
            counts=pack_int32(counts),
            num_blocks=pack_int32(lengths),
        )

    def find(self, requests: Sequence[Request]) -> list[Prefix]:
        """Returns prefixes of one request each at most, which save most reads together.

        A block id stands for all tokens up to it: the prefix index shares no block between requests
        that differ before it.
        """
        return self._find_after(requests, 0, _MOST_LEVELS)

    def _find_after(
        self, requests: Sequence[Request], num_blocks: int, num_levels: int
    ) -> list[Prefix]:
        """Returns the prefixes of requests that share `num_blocks`, each of more blocks."""
        branches: dict[int, list[Request]] = {}
        entry = num_blocks * self._num_groups
        for request in requests:
            if entry < len(request.block_ids):
                branches.setdefault(request.block_ids[entry], []).append(request)
        found: list[Prefix] = []
        for branch in branches.values():
            if len(branch) < LEAST_SHARING_REQUESTS:
                continue
            length = self._num_common(branch, num_blocks + 1)
            below = self._find_after(branch, length, num_levels - 1) if num_levels > 1 else []
            here = (branch, length)
            num_tokens = length * self._block_size
            if not pays(len(branch), num_tokens, least_saved=self._least_saved) or sum(
                map(_num_saved, below)
            ) > _num_saved(here):
                found += below
            else:
                found.append(here)
        return found

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


def _num_saved(prefix: Prefix) -> int:
    """Returns how many blocks need not be read again."""
    requests, num_blocks = prefix
    return (len(requests) - 1) * num_blocks
