"""The initial state of a recording, as an order to the worker's tables."""

from collections.abc import Mapping
from dataclasses import dataclass

from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.batch import BatchDescriptor, pack_int32, read_int32
from services.engine.limits import StepLimits
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


def read_opening(snapshot: Snapshot, blocks: BlockNumbers, *, limits: StepLimits) -> Opening:
    """Reads a snapshot whose blocks were noted.

    Args:
        snapshot: rows of an engine.
        blocks: numbers of the blocks.
        limits: of the recorded engine.

    Raises:
        ReplayError: a row has more computed tokens than tokens or blocks, or lacks its states.
    """
    descriptor = BatchDescriptor(row_assignments=[row.assignment for row in snapshot.rows])
    updates = descriptor.attn_metadata.block_table_updates
    parts = [
        (row.assignment.row, offset, block_ids)
        for row in snapshot.rows
        for offset, block_ids in (
            (0, row.block_ids),
            (limits.token_table_width, row.state_block_ids),
        )
        if block_ids
    ]
    updates.rows = pack_int32([row for row, _, _ in parts])
    updates.offsets = pack_int32([offset for _, offset, _ in parts])
    updates.counts = pack_int32([len(read_int32(block_ids)) for _, _, block_ids in parts])
    updates.block_ids = b"".join(block_ids for _, _, block_ids in parts)
    blocks.renumber(updates)
    for row in snapshot.rows:
        limit = len(read_int32(row.assignment.token_ids))
        if limits.num_groups:
            num_blocks = len(read_int32(row.block_ids)) // limits.num_groups
            limit = min(limit, num_blocks * snapshot.engine.block_size)
        if len(read_int32(row.state_block_ids)) != limits.num_state_blocks:
            raise ReplayError(
                f"row {row.assignment.row} of the snapshot has no states, of a model that keeps "
                "some"
            )
        if row.num_computed_tokens > limit:
            raise ReplayError(
                f"row {row.assignment.row} of the snapshot has {row.num_computed_tokens} computed "
                f"tokens, but tokens and blocks for {limit}"
            )
    return Opening(
        descriptor=descriptor,
        num_computed={row.assignment.row: row.num_computed_tokens for row in snapshot.rows},
    )
