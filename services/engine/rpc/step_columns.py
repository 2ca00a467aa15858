"""Output of a session's requests, in columns until its stream takes a message."""

from array import array

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

    def __init__(self) -> None:
        self.num_bytes = 0
        """Approximate wire size of the message."""
        self._handles: list[bytes] = []
        """The request of each token, in the order of the tokens."""
        self._token_ids: list[bytes] = []
        self._may_repeat = False
        """Whether a request may have several tokens."""
        self._logprobs: dict[int, list[PositionLogprobs]] = {}
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._finished: dict[int, Finished] = {}

    def __bool__(self) -> bool:
        return bool(self._handles or self._finished or self._prompt_logprobs)

    def has_ending_of(self, handle: int) -> bool:
        """Whether the message includes the end of this request."""
        return handle in self._finished

    def add_tokens(self, handles: bytes, token_ids: bytes) -> None:
        """Takes one token of each of several requests, both packed."""
        self._may_repeat |= bool(self._handles)
        self._handles.append(handles)
        self._token_ids.append(token_ids)
        self.num_bytes += _BYTES_PER_ENTRY * len(token_ids) // _UINT32.itemsize

    def add(self, output: RequestOutput) -> None:
        """Takes one request's output of one step."""
        token_ids, handle = output.token_ids, output.request.handle
        if token_ids:
            self._may_repeat |= bool(self._handles) or len(token_ids) > 1
            self._handles.append(array("I", [handle]).tobytes() * len(token_ids))
            self._token_ids.append(array("I", token_ids).tobytes())
            self.num_bytes += _BYTES_PER_ENTRY * len(token_ids)
            if output.logprobs:
                self._add_logprobs(handle, output)
        if output.prompt_logprobs:
            told = prompt_logprobs_to_proto(output)
            self._prompt_logprobs.setdefault(handle, []).extend(told)
            self.num_bytes += _BYTES_PER_ENTRY * sum(1 + len(entry.top) for entry in told)
        if output.is_last:
            self._add_ending(output)

    def to_message(self) -> EngineMessage:
        """Returns everything gathered as one message."""
        step = StepOutput(
            handles=b"".join(self._handles),
            token_ids=b"".join(self._token_ids),
            finished=self._finished.values(),
        )
        if self._may_repeat:
            _join_repeated(step)
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


def _join_repeated(step: StepOutput) -> None:
    """Lets a message that has tokens of a request apart have them one after the other."""
    handles = np.frombuffer(step.handles, _UINT32)
    order = np.argsort(handles, kind="stable")
    handles = handles[order]
    starts = np.flatnonzero(np.diff(handles, prepend=~handles[:1]))
    if len(starts) == len(handles):
        return
    step.handles = handles[starts].tobytes()
    step.token_ids = np.frombuffer(step.token_ids, _UINT32)[order].tobytes()
    step.num_tokens = np.diff(starts, append=len(handles)).astype(_UINT32).tobytes()
