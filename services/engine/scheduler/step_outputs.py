"""The outputs of a step: tokens in columns, and all else by request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.engine.batch import Int32Array
from services.engine.request import Request, RequestOutput, StepMark


class TokenColumn(NamedTuple):
    """Requests that got one token each, which is not their first or last, and nothing else.

    requests: in order; steps in a row with the same ones share the list. token_ids: [n], of each.
    waited: how many of them had their last tokens in which step. at_s: when these came.
    """

    requests: Sequence[Request]
    token_ids: Int32Array
    waited: Mapping[StepMark, int]
    at_s: float


@dataclass(slots=True)
class StepOutputs:
    """One output of each request that got some in a step.

    columns: one for each data-parallel rank with decodes. others: the outputs that no column has.
    """

    columns: list[TokenColumn] = field(default_factory=list)
    others: list[RequestOutput] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.others) + sum(len(column.requests) for column in self.columns)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yields the output of each request."""
        for column in self.columns:
            for request, token_id in zip(column.requests, column.token_ids.tolist(), strict=True):
                yield RequestOutput(request, [token_id])
        yield from self.others
