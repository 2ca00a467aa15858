"""The initial state of a recording, as an order to the worker's tables."""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import BatchDescriptor, pack_int32, read_int32
from services.engine.replay.cache_content import BlockNumbers
from services.engine.replay.recording import ReplayError


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Rows and blocks of a snapshot.

    descriptor: assigns them and computes nothing. num_computed: tokens of each row with keys and
    values in its blocks.
    """

    descriptor: BatchDescriptor
    num_computed: Mapping[int, int]


def read_opening(snapshot: Snapshot, blocks: BlockNumbers, *, num_groups: int = 1) -> Opening:
    """Reads a snapshot whose blocks were noted.

    Args:
        snapshot: rows of an engine.
        blocks: numbers of the blocks.
        num_groups: layer groups, each with an entry in the rows' tables.

    Raises:
        ReplayError: a row has more computed tokens than tokens or blocks.
    """
    descriptor = BatchDescriptor(row_assignments=[row.assignment for row in snapshot.rows])
    updates = descriptor.attn_metadata.block_table_updates
    counts = [len(read_int32(row.block_ids)) for row in snapshot.rows]
    updates.rows = pack_int32([row.assignment.row for row in snapshot.rows])
    updates.offsets = pack_int32([0] * len(counts))
    updates.counts = pack_int32(counts)
    updates.block_ids = b"".join(row.block_ids for row in snapshot.rows)
    blocks.renumber(updates)
    for row, count in zip(snapshot.rows, counts, strict=True):
        room = count // num_groups * snapshot.engine.block_size
        limit = min(len(read_int32(row.assignment.token_ids)), room)
        if row.num_computed_tokens > limit:
            raise ReplayError(
                f"row {row.assignment.row} of the snapshot has {row.num_computed_tokens} computed "
                f"tokens, but tokens and blocks for {limit}"
            )
    return Opening(
        descriptor=descriptor,
        num_computed={row.assignment.row: row.num_computed_tokens for row in snapshot.rows},
    )
