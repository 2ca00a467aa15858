"""Counts and rates of several processes, in memory that they share."""

import contextlib
import hashlib
import mmap
import struct
import time
from collections.abc import Iterator

from services.processes.shared_locks import SharedLocks
from services.transport.counts import Clock, Rate

NUM_BUCKETS = 2048
BUCKET_NAMES = 32
"""Names in use at a time whose hashes fall into one bucket."""
_KEY_BYTES = 16
_FREE = bytes(_KEY_BYTES)
_LEVEL = struct.Struct("=3d")
"""A token bucket: its level, when that was right, and when it is full again; zeros: full."""


class CountTable:
    """The memory of counts, made before the processes that share it are forked.

    A hash table of fixed size. A name has a slot while something is held under it or its token
    bucket is not full. Each bucket of slots has a lock of the kernel's, which ends with its holder.
    """

    def __init__(self, num_processes: int) -> None:
        """Makes an empty table; untouched parts take no memory."""
        self.num_processes = num_processes
        self.held = struct.Struct(f"={num_processes}q")
        """The amounts that each process holds under one name."""
        self._slot_bytes = self.held.size + _LEVEL.size
        self._bucket_bytes = BUCKET_NAMES * (_KEY_BYTES + self._slot_bytes)
        self.memory = mmap.mmap(-1, NUM_BUCKETS * self._bucket_bytes)
        self._locks = SharedLocks()

    @contextlib.contextmanager
    def slot(self, name: str, *, now_s: float, is_new: bool = True) -> Iterator[int | None]:
        """Locks a name's slot and yields where it is; None if it has none and `is_new` is false.

        Raises:
            RuntimeError: too many names are in use.
        """
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=24).digest()
        key = digest[:_KEY_BYTES]
        bucket = int.from_bytes(digest[_KEY_BYTES:]) % NUM_BUCKETS
        with self._locks.hold(bucket):
            yield self._find(bucket, key, now_s=now_s, is_new=is_new)

    def release(self, process: int) -> None:
        """Gives back all that a dead process held."""
        own = struct.Struct("=q")
        for bucket in range(NUM_BUCKETS):
            with self._locks.hold(bucket):
                for index in range(BUCKET_NAMES):
                    at = self._place(bucket, index) + own.size * process
                    if any(own.unpack_from(self.memory, at)):  # writing would take memory
                        own.pack_into(self.memory, at, 0)

    def level_at(self, slot: int) -> int:
        """Returns where the token bucket of a slot is."""
        return slot + self.held.size

    def _find(self, bucket: int, key: bytes, *, now_s: float, is_new: bool) -> int | None:
        index = self._index_of(bucket, key)
        if index is None and is_new:
            index = self._index_of(bucket, _FREE)
            if index is None:
                self._sweep(bucket, now_s)
                index = self._index_of(bucket, _FREE)
            if index is None:
                raise RuntimeError(f"the shared table holds {BUCKET_NAMES} names of one bucket")
            self._set_key(bucket, index, key)
        return None if index is None else self._place(bucket, index)

    def _index_of(self, bucket: int, key: bytes) -> int | None:
        start = bucket * self._bucket_bytes
        end = start + BUCKET_NAMES * _KEY_BYTES
        at = self.memory.find(key, start, end)
        while at >= 0 and (at - start) % _KEY_BYTES:  # across two keys
            at = self.memory.find(key, at + 1, end)
        return None if at < 0 else (at - start) // _KEY_BYTES

    def _set_key(self, bucket: int, index: int, key: bytes) -> None:
        at = bucket * self._bucket_bytes + index * _KEY_BYTES
        self.memory[at : at + _KEY_BYTES] = key

    def _sweep(self, bucket: int, now_s: float) -> None:
        """Frees the slots that hold nothing and whose token buckets are full."""
        for index in range(BUCKET_NAMES):
            slot = self._place(bucket, index)
            _, _, full_s = _LEVEL.unpack_from(self.memory, self.level_at(slot))
            if full_s <= now_s and not any(self.held.unpack_from(self.memory, slot)):
                self._set_key(bucket, index, _FREE)
                self.memory[slot : slot + self._slot_bytes] = bytes(self._slot_bytes)

    def _place(self, bucket: int, index: int) -> int:
        start = bucket * self._bucket_bytes + BUCKET_NAMES * _KEY_BYTES
        return start + index * self._slot_bytes


class SharedCounts:
    """The counts of one of several processes, against limits of all; see `Counts`.

    A call makes two system calls, for the lock, and waits only for calls of other processes about
    the same bucket. `CountTable.release` gives back the amounts of a dead process.
    """

    def __init__(self, table: CountTable, process: int, *, clock: Clock = time.monotonic) -> None:
        """Counts in `table`; `clock` returns seconds that mean the same in all processes."""
        self._table = table
        self._own = struct.Struct("=q")
        self._offset = self._own.size * process
        self._clock = clock

    def take(self, name: str, amount: int = 1, *, limit: int | None) -> bool:
        """Adds to a count, unless that takes it over its limit; see `Counts`."""
        with self._table.slot(name, now_s=self._clock()) as slot:
            assert slot is not None, "a new one is made"
            held = self._table.held.unpack_from(self._table.memory, slot)
            if limit is not None and sum(held) + amount > limit:
                return False
            self._add(slot, amount)
        return True

    def give_back(self, name: str, amount: int = 1) -> None:
        """Subtracts what `take` added; see `Counts`."""
        with self._table.slot(name, now_s=self._clock(), is_new=False) as slot:
            if slot is None:
                assert not amount, f"more was given back than taken: {name}"
            else:
                self._add(slot, -amount)

    def held(self, name: str) -> int:
        """Returns a count, of all processes; see `Counts`."""
        with self._table.slot(name, now_s=self._clock(), is_new=False) as slot:
            if slot is None:
                return 0
            return sum(self._table.held.unpack_from(self._table.memory, slot))

    def draw(self, name: str, amount: float, *, rate: Rate, needs: float | None) -> float:
        """Draws tokens from a bucket; see `Counts`."""
        now_s = self._clock()
        with self._table.slot(name, now_s=now_s) as slot:
            assert slot is not None, "a new one is made"
            at = self._table.level_at(slot)
            level, filled_s, full_s = _LEVEL.unpack_from(self._table.memory, at)
            if full_s:
                level = min(rate.capacity, level + (now_s - filled_s) * rate.per_s)
            else:
                level = rate.capacity
            if needs is not None and level < needs:
                return float(needs - level)
            level = min(rate.capacity, level - amount)
            full_s = now_s + (rate.capacity - level) / rate.per_s
            _LEVEL.pack_into(self._table.memory, at, level, now_s, full_s)
        return 0.0

    def _add(self, slot: int, amount: int) -> None:
        at = slot + self._offset
        [own] = self._own.unpack_from(self._table.memory, at)
        assert own + amount >= 0, "more was given back than taken"
        self._own.pack_into(self._table.memory, at, own + amount)
