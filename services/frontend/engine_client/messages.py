"""What passes through the frontend as the engine said it, or as the caller did.

Sampling goes to the engine and log-probabilities and usage come back without being taken apart, so
they stay the protobuf messages that they are on both wires.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import numpy as np

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import (
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    StructuredOutput,
    TextChoice,
    Usage,
)
from protos.engine.v1.engine_pb2 import Finished, GetModelInfoResponse
from services.frontend.errors import (
    DeadlineExpiredError,
    DuplicateRequestError,
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
    UnknownModelError,
)

__all__ = [
    "ABORTED",
    "STOP",
    "EngineRequest",
    "FinishReason",
    "ModelInfo",
    "PositionLogprobs",
    "SamplingParams",
    "StructuredOutput",
    "TextChoice",
    "TokenBatch",
    "TokenSink",
    "Usage",
    "error_of",
    "pack_uint32",
    "read_uint32",
]

ModelInfo = GetModelInfoResponse
"""What the engine serves, and its limits."""
STOP = FinishReason.FINISH_REASON_STOP
ABORTED = FinishReason.FINISH_REASON_ABORTED
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request in tokens; fields mean what Submit of protos/engine/v1/engine.proto says."""

    request_id: str
    prompt_token_ids: bytes
    """The prompt, and behind it the tokens that an engine made before it was lost; see
    `pack_uint32`. Packed, because it is kept until the request has ended."""
    num_resumed_tokens: int = 0
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    deadline_s: float | None = None
    """When its time is over, in seconds of `time.monotonic()`; None sets no limit."""

    @property
    def timeout_ms(self) -> int | None:
        """What is left of its time, at least 1 ms; None where there is no limit.

        Raises:
            DeadlineExpiredError: nothing is left.
        """
        if self.deadline_s is None:
            return None
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExpiredError("the request's time was over before an engine had it")
        return max(1, int(remaining_s * 1000))


@dataclass(slots=True)
class TokenBatch:
    """New tokens of one request, of one engine step or of several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """One entry per token id where the request asked for log-probabilities, else empty."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """One entry per prompt token but the first, in the first batch, where they were asked for."""
    finish_reason: FinishReason | None = None
    """None while the request goes on."""
    usage: Usage | None = None
    """What the request cost; set in the last batch."""
    stop_token_id: int | None = None
    """The token, last of all, that ended the request; None when none did."""


class TokenSink(Protocol):
    """Takes one request's output from its engine. Nothing comes after its end or its error."""

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Takes new tokens; without any, the news that the engine has taken the request."""

    def put_finished(self, finished: Finished) -> None:
        """Takes the end of a request that was served."""

    def put_error(self, error: Exception) -> None:
        """Takes the request's failure."""


def read_uint32(data: bytes) -> list[int]:
    """Unpacks a column of little-endian uint32."""
    values: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return values


def pack_uint32(values: Sequence[int]) -> bytes:
    """Packs a column of little-endian uint32; every value must fit."""
    # An array in between takes a third of the time that NumPy needs for Python's numbers.
    return np.array(array("I", values), dtype="<u4").tobytes()


def error_of(failure: Failure) -> Exception:
    """Returns the error that the engine's failure of one request is here.

    Codes that callers may see become the FrontendError of the same meaning, any other an
    EngineFaultError.
    """
    retry_after_ms = failure.retry_after_ms if failure.HasField("retry_after_ms") else None
    match _STATUS_CODES.get(failure.code):
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(failure.message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExpiredError(failure.message)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModelError(failure.message)
        case grpc.StatusCode.ALREADY_EXISTS:
            return DuplicateRequestError(failure.message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(failure.message, retry_after_ms=retry_after_ms)
        case grpc.StatusCode.UNAVAILABLE:
            return EngineUnavailableError(failure.message, retry_after_ms=retry_after_ms)
    return EngineFaultError(f"the engine failed with code {failure.code}: {failure.message}")
