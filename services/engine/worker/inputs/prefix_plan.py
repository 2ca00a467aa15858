"""The plan of a step's shared prefixes, read from its descriptor and written to the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import (
    MAX_PREFIX_LEVELS,
    MAX_PREFIX_TILES,
    TILE_QUERIES,
    GraphKey,
    PrefixPlan,
)
from services.engine.batch import SharedPrefixes, pack_int32, read_int32
from services.engine.limits import LEAST_SHARING_REQUESTS
from services.engine.worker.inputs.checks import Int32Array, is_below, require
from services.engine.worker.inputs.transfer import overwrite

_Values = TypeVar("_Values", Int32Array, Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPrefixes:
    """The fields of PrefixPlan, of a step of R requests.

    tiles: [5, MAX_PREFIX_TILES]. queries: [M]. tile_slots: [R, MAX_PREFIX_LEVELS + 1].
    num_shared: [R], the keys that each request shares.
    """

    tiles: Int32Array
    queries: Int32Array
    tile_slots: Int32Array
    num_shared: Int32Array

    @classmethod
    def read(
        cls,
        prefixes: SharedPrefixes,
        *,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        block_size: int,
        most_queries: int = 1,
    ) -> "PlannedPrefixes | None":
        """Checks a step's shared prefixes and cuts their queries into tiles.

        Prefixes that no tile is left for are not shared. most_queries: of a request that decodes.

        Returns:
            None without shared prefixes.

        Raises:
            ValueError: a request cannot have such a prefix, or prefixes do not form trees.
        """
        planned = _cut(
            prefixes.requests,
            prefixes.counts,
            prefixes.num_blocks,
            block_size,
            pack_int32(query_start_loc),
        )
        if planned is None:
            return None
        members = np.flatnonzero(planned.num_shared)
        q_lens = query_start_loc[1:] - query_start_loc[:-1]
        are_decodes = (q_lens[members] > 0) & (q_lens[members] <= most_queries)
        require(
            bool(are_decodes.all()), f"a prefix of a request with more queries than {most_queries}"
        )
        fits = planned.num_shared[members] <= seq_lens[members] - q_lens[members]
        require(bool(fits.all()), "a prefix longer than its request")
        return planned


@lru_cache(maxsize=8)
def _cut(
    packed_requests: bytes,
    packed_counts: bytes,
    packed_blocks: bytes,
    block_size: int,
    packed_starts: bytes,
) -> PlannedPrefixes | None:
    """Returns the plan of prefixes as they travel; steps mostly repeat that of the step before."""
    requests, counts = read_int32(packed_requests), read_int32(packed_counts)
    starts = read_int32(packed_starts)
    q_lens, num_requests = np.diff(starts), len(starts) - 1
    num_keys = read_int32(packed_blocks) * np.int32(block_size)
    require(len(counts) == len(num_keys), "prefixes without a length")
    if not len(counts):
        require(not len(requests), "requests without their prefix")
        return None
    require(int(counts.min()) > 1, "a prefix of one request")
    require(int(num_keys.min()) > 0, "a prefix without keys")
    require(int(counts.sum()) == len(requests), "requests of prefixes missing or left over")
    require(is_below(requests, num_requests), "a prefix of a request out of the batch")
    require(len(requests) <= MAX_PREFIX_LEVELS * num_requests, "too many requests of prefixes")
    tiles = np.zeros((5, MAX_PREFIX_TILES), np.int32)
    tile_slots = np.full((num_requests, MAX_PREFIX_LEVELS + 1), -1, np.int32)
    num_shared = np.zeros(num_requests, np.int32)
    num_levels = np.zeros(num_requests, np.int32)
    num_tiles = end = num_queries = 0
    queries = []
    for count, length in zip(counts.tolist(), num_keys.tolist(), strict=True):
        first, end = end, end + count
        members = requests[first:end]
        require(len(np.unique(members)) == count, "a request twice in a prefix")
        start, level = int(num_shared[members[0]]), int(num_levels[members[0]])
        is_of_tree = (num_shared[members] == start) & (num_levels[members] == level)
        require(bool(is_of_tree.all()), "a prefix of requests with different ones before it")
        require(start < length, "a prefix no longer than the one before it")
        require(level < MAX_PREFIX_LEVELS, "a request with too many prefixes")
        tokens, places = _queries_of(starts[members], q_lens[members])
        firsts = np.arange(0, len(tokens), TILE_QUERIES, dtype=np.int32)
        cut = slice(num_tiles, num_tiles + len(firsts))
        if cut.stop > MAX_PREFIX_TILES:
            continue
        tiles[0, cut] = num_queries + firsts
        tiles[1, cut] = np.minimum(len(tokens) - firsts, TILE_QUERIES)
        tiles[2:, cut] = [[start], [length - start], [members[0]]]
        tile_slots[members, level] = num_tiles * TILE_QUERIES + places
        num_shared[members] = length
        num_levels[members] += 1
        num_tiles = cut.stop
        num_queries += len(tokens)
        queries.append(tokens)
    return PlannedPrefixes(
        tiles=tiles,
        queries=np.concatenate(queries) if queries else requests[:0],
        tile_slots=tile_slots,
        num_shared=num_shared,
    )


def _queries_of(starts: Int32Array, q_lens: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Returns the query tokens of requests, one after the other, and where each one's begin."""
    places = np.cumsum(q_lens, dtype=np.int32) - q_lens
    tokens = np.repeat(starts - places, q_lens) + np.arange(q_lens.sum(), dtype=np.int32)
    return tokens, places


class PrefixBuffers:
    """The plan of the present step on the device, at constant addresses.

    memory: int32, what PlannedPrefixes has, of the most requests.
    """

    def __init__(self, num_requests: int, device: torch.device, *, num_queries: int = 1) -> None:
        """Starts without shared prefixes.

        num_requests: most of a step, dummies included. num_queries: most of one that decodes.
        """
        self._num_queries = num_queries
        num_slots = (MAX_PREFIX_LEVELS + 1) * num_requests
        sizes = 5 * MAX_PREFIX_TILES, MAX_PREFIX_TILES * TILE_QUERIES, num_slots
        self._ends = np.cumsum(sizes).tolist()
        self._nothing = np.zeros(self._ends[-1] + num_requests, np.int32)
        self._parts(self._nothing)[2][:] = -1
        self._written: PlannedPrefixes | None = None
        self._builds_kernels = False
        self.memory = torch.from_numpy(self._nothing).to(device, copy=True)

    @contextmanager
    def building_kernels(self) -> Iterator[None]:
        """Gives all steps a plan for the length of the block, whatever they share."""
        self._builds_kernels = True
        try:
            yield
        finally:
            self._builds_kernels = False

    def write(self, prefixes: PlannedPrefixes | None, key: GraphKey | None = None) -> None:
        """Writes a step's plan, unless it is that of the step before or its graph reads none."""
        if prefixes is self._written or not _may_share(key):
            return
        values = self._nothing.copy()
        if prefixes is not None:
            planned = prefixes.tiles, prefixes.queries, prefixes.tile_slots, prefixes.num_shared
            for part, content in zip(self._parts(values), planned, strict=True):
                part[: content.size] = content.ravel()
        overwrite(self.memory, values)
        self._written = prefixes  # what fails for lack of memory has written nothing

    def plan(self, seq_lens: Tensor, key: GraphKey | None = None) -> PrefixPlan | None:
        """Returns the plan of R requests with these sequence lengths, [R] int32.

        Few requests have none, nor have steps that share nothing, and whole graphs of such steps.

        key: the graph that is recorded or replayed.
        """
        num_requests = len(seq_lens)
        if num_requests < LEAST_SHARING_REQUESTS or not _may_share(key):
            return None
        shares = key is not None and key.shares_prefixes
        if not (shares or self._builds_kernels or self._written is not None):
            return None
        tiles, queries, tile_slots, num_shared = self._parts(self.memory)
        return PrefixPlan(
            tiles=tiles.view(5, MAX_PREFIX_TILES),
            queries=queries,
            tile_slots=tile_slots.view(-1, MAX_PREFIX_LEVELS + 1)[:num_requests],
            own_lens=seq_lens - num_shared[:num_requests],
            num_queries=self._num_queries,
        )

    def _parts(self, values: _Values) -> tuple[_Values, _Values, _Values, _Values]:
        """Returns the four parts of the memory."""
        first, second, third = self._ends
        return values[:first], values[first:second], values[second:third], values[third:]


def _may_share(key: GraphKey | None) -> bool:
    """Whether attention reads a plan: launched by the host, or in a graph that has one."""
    return key is None or key.shares_prefixes or key.kind.runtime_mode is not CUDAGraphMode.FULL
