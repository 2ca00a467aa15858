"""Snapshots of the rows before a step, which begin a recording."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from protos.engine.v1.batch_pb2 import AdapterLoad
from protos.engine.v1.recording_pb2 import RowSnapshot, Snapshot
from services.engine.batch import StepResult, pack_int32, read_tokens, row_assignment
from services.engine.prompt_image import EncoderImage
from services.engine.request import Request
from services.engine.scheduler.scheduler import ScheduledStep


def _no_slot(request: Request) -> int:
    """Returns the adapter slot of a request of an engine without adapters."""
    return 0


@dataclass(slots=True)
class _Row:
    row: int
    token_ids: list[int]
    block_ids: bytes
    state_block_ids: bytes
    num_computed_tokens: int
    adapter_slot: int


class PendingSnapshot:
    """All rows before the next step to be scheduled.

    The scheduler already counts the tokens that steps in flight compute; their results add the
    sampled tokens.
    """

    def __init__(
        self,
        running: Iterable[Request],
        *,
        adapter_slot: Callable[[Request], int] = _no_slot,
        slots: Mapping[bytes, int] | None = None,
        next_step_id: int,
        num_in_flight: int,
    ) -> None:
        """Copies the rows of running requests.

        Args:
            running: the scheduler's running requests, between two steps.
            adapter_slot: returns one more than the slot of a request's adapter.
            slots: the slot of each adapter that has one, by its digest.
            next_step_id: the next step to be scheduled.
            num_in_flight: earlier steps without a result.
        """
        self._next_step_id = next_step_id
        self._num_in_flight = num_in_flight
        self._slots = dict(slots or {})
        self._rows = {request: _row(request, adapter_slot(request)) for request in running}

    @property
    def is_settled(self) -> bool:
        """Whether all results have come."""
        return not self._num_in_flight

    def take(self, step: ScheduledStep, result: StepResult) -> None:
        """Takes the tokens of the oldest step in flight."""
        for request, token_ids in zip(step.requests, read_tokens(result), strict=True):
            row = self._rows.get(request)
            if row is not None:
                row.token_ids += token_ids
                if result.num_accepted_tokens:
                    # Tokens computed from rejected drafts are void.
                    row.num_computed_tokens = len(row.token_ids) - 1
        self._num_in_flight -= 1

    @property
    def images(self) -> Iterator[EncoderImage]:
        """The images in the prompts of all rows."""
        return (each.image for request in self._rows for each in request.images)

    def message(self) -> Snapshot:
        """Returns the settled snapshot, without the engine's settings."""
        return Snapshot(
            next_step_id=self._next_step_id,
            adapters=[
                AdapterLoad(slot=slot, digest=digest) for digest, slot in self._slots.items()
            ],
            rows=[
                RowSnapshot(
                    assignment=row_assignment(
                        row=row.row,
                        token_ids=row.token_ids,
                        num_prompt_tokens=request.num_prompt_tokens,
                        sampling=request.sampling,
                        images=request.images,
                        adapter_slot=row.adapter_slot,
                    ),
                    block_ids=row.block_ids,
                    state_block_ids=row.state_block_ids,
                    num_computed_tokens=row.num_computed_tokens,
                )
                for request, row in self._rows.items()
            ],
        )


def _row(request: Request, adapter_slot: int) -> _Row:
    assert request.row is not None, "a running request has a row"
    return _Row(
        row=request.row,
        token_ids=list(request.token_ids),
        block_ids=pack_int32(request.block_ids),
        state_block_ids=pack_int32(request.state_block_ids),
        num_computed_tokens=request.num_computed_tokens,
        adapter_slot=adapter_slot,
    )
