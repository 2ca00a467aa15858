"""A step's copies between blocks and slots, viewed and checked before any is made."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.engine.batch import BatchDescriptor, read_int32
from services.engine.kv_cache.host_tier import ENTRY_BYTES
from services.engine.worker.inputs.checks import Int32Array, is_below, require


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrders:
    """Blocks to store in slots, and slots to load into blocks.

    stored_from, stored_to: [n], blocks and their slots. loaded_from, loaded_to: [m], slots and
    their blocks. stored_entries: [n], names of what is stored, or none. read_entries, read_to: [r],
    names of blocks on disk, and slots.
    """

    stored_from: Int32Array
    stored_to: Int32Array
    loaded_from: Int32Array
    loaded_to: Int32Array
    stored_entries: Sequence[bytes] = ()
    read_entries: Sequence[bytes] = ()
    read_to: Int32Array = field(default_factory=lambda: read_int32(b""))

    @classmethod
    def read(
        cls, descriptor: BatchDescriptor, *, num_blocks: int, num_slots: int, max_loads: int
    ) -> "CopyOrders | None":
        """Views and checks the copies of a step; None for none.

        Raises:
            ValueError: lists differ in length, a block or slot does not exist or is written twice,
                or the step loads more than `max_loads` blocks.
        """
        if not descriptor.HasField("block_copies"):
            return None
        copies = descriptor.block_copies
        orders = cls(
            stored_from=read_int32(copies.stored_from),
            stored_to=read_int32(copies.stored_to),
            loaded_from=read_int32(copies.loaded_from),
            loaded_to=read_int32(copies.loaded_to),
            stored_entries=_names(copies.stored_entries),
            read_entries=_names(copies.read_entries),
            read_to=read_int32(copies.read_to),
        )
        names = len(orders.stored_entries)
        require(names in (0, len(orders.stored_to)), "blocks to store without a name")
        require(len(orders.read_entries) == len(orders.read_to), "reads of unequal length")
        require(is_below(orders.read_to, num_slots), "a read into a slot that does not exist")
        written = np.concatenate((orders.stored_to, orders.read_to))
        require(len(np.unique(written)) == len(written), "two copies into one slot")
        for blocks, slots, written in (
            (orders.stored_from, orders.stored_to, orders.stored_to),
            (orders.loaded_to, orders.loaded_from, orders.loaded_to),
        ):
            require(len(blocks) == len(slots), "copies of blocks of unequal length")
            require(is_below(blocks, num_blocks), "a copy of a block that does not exist")
            require(is_below(slots, num_slots), "a copy of a slot that does not exist")
            require(len(np.unique(written)) == len(written), "two copies into one place")
        require(bool((orders.loaded_to != 0).all()), "a copy into the null block")
        require(len(orders.loaded_to) <= max_loads, f"more than {max_loads} blocks to load")
        return orders


def _names(data: bytes) -> list[bytes]:
    require(len(data) % ENTRY_BYTES == 0, "a name of a block that is cut short")
    return [data[start : start + ENTRY_BYTES] for start in range(0, len(data), ENTRY_BYTES)]
