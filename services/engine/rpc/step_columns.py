"""Output of a session's requests, in columns until its stream takes a message."""

from itertools import chain

import numpy as np

from protos.common.v1.sampling_pb2 import PositionLogprobs
from protos.engine.v1.engine_pb2 import EngineMessage, Finished, RequestLogprobs, StepOutput
from services.engine.edge.output import (
    FINISH_REASONS,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    usage_of,
)
from services.engine.edge.status import failure_of
from services.engine.request import RequestOutput

_UINT32 = np.dtype("<u4")
_BYTES_PER_ENTRY = 12
"""Wire size of a request with one new token, and about that of one log-probability."""


class StepColumns:
    """Merges the outputs of one or more steps into one message.

    Each request occurs once in a message.
    """

    __slots__ = ("_finished", "_logprobs", "_prompt_logprobs", "_tokens", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        """Approximate wire size of the message."""
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[PositionLogprobs]] = {}
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._finished: dict[int, Finished] = {}

    def __bool__(self) -> bool:
        return bool(self._tokens or self._finished or self._prompt_logprobs)

    def has_ending_of(self, handle: int) -> bool:
        """Whether the message includes the end of this request."""
        return handle in self._finished

    def add(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        token_ids = output.token_ids
        if token_ids:
            handle = output.request.handle
            earlier = self._tokens.get(handle)
            if earlier is None:
                self._tokens[handle] = token_ids
            else:
                earlier.extend(token_ids)
            self.num_bytes += _BYTES_PER_ENTRY * len(token_ids)
            if output.logprobs:
                self._add_logprobs(handle, output)
        if output.prompt_logprobs:
            told = prompt_logprobs_to_proto(output)
            self._prompt_logprobs.setdefault(output.request.handle, []).extend(told)
            self.num_bytes += _BYTES_PER_ENTRY * sum(1 + len(entry.top) for entry in told)
        if output.is_last:
            self._add_ending(output)

    def to_message(self) -> EngineMessage:
        """Returns everything gathered as one message."""
        token_ids = list(chain.from_iterable(self._tokens.values()))
        step = StepOutput(
            handles=_pack(list(self._tokens)),
            token_ids=_pack(token_ids),
            finished=self._finished.values(),
        )
        if len(token_ids) != len(self._tokens):  # each has one at least
            step.num_tokens = _pack(list(map(len, self._tokens.values())))
        for handle, positions in self._logprobs.items():
            step.logprobs.append(RequestLogprobs(handle=handle, positions=positions))
        for handle, positions in self._prompt_logprobs.items():
            step.prompt_logprobs.append(RequestLogprobs(handle=handle, positions=positions))
        return EngineMessage(step=step)

    def _add_logprobs(self, handle: int, output: RequestOutput) -> None:
        positions = self._logprobs.setdefault(handle, [])
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            positions.append(logprobs_to_proto(token_id, entry))
            self.num_bytes += _BYTES_PER_ENTRY * (1 + len(entry.top_token_ids))

    def _add_ending(self, output: RequestOutput) -> None:
        request = output.request
        finished = Finished(handle=request.handle, usage=usage_of(request))
        if output.error is not None:
            finished.failure.CopyFrom(failure_of(output.error))
        elif output.finish_reason is not None:
            finished.finish_reason = FINISH_REASONS[output.finish_reason]
        finished.vector = output.vector
        if output.stop_token_id is not None:
            finished.stop_token_id = output.stop_token_id
        self._finished[request.handle] = finished
        self.num_bytes += finished.ByteSize()


def _pack(values: list[int]) -> bytes:
    return np.array(values, _UINT32).tobytes()
