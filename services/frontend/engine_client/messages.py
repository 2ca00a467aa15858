"""Messages that pass through the frontend unchanged, as protobuf of both wires."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import numpy as np

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import (
    ArgumentPairs,
    FinishReason,
    PositionLogprobs,
    Preamble,
    SamplingParams,
    StructuredOutput,
    Tag,
    TaggedText,
    TextChoice,
    Usage,
)
from protos.engine.v1.engine_pb2 import (
    Finished,
    GetModelInfoResponse,
    PairText,
    Pooling,
    PoolingTask,
)
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
    "LENGTH",
    "STOP",
    "TOKEN_BYTES",
    "ArgumentPairs",
    "EngineRequest",
    "FinishReason",
    "ModelInfo",
    "PairText",
    "PlacedImage",
    "Pooling",
    "PoolingTask",
    "PositionLogprobs",
    "Preamble",
    "SamplingParams",
    "StructuredOutput",
    "Tag",
    "TaggedText",
    "TextChoice",
    "TokenBatch",
    "TokenSink",
    "Usage",
    "error_of",
    "pack_uint32",
    "read_uint32",
]

ModelInfo = GetModelInfoResponse
"""The served model and its limits."""
LENGTH = FinishReason.FINISH_REASON_LENGTH
STOP = FinishReason.FINISH_REASON_STOP
ABORTED = FinishReason.FINISH_REASON_ABORTED
TOKEN_BYTES = 4
"""Bytes of a packed token id."""
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image in a prompt; see Image and ImagePart in protos/engine/v1/engine.proto."""

    digest: bytes
    grid: Sequence[int]
    patches: bytes | memoryview
    """uint8."""
    offset: int
    """Where its tokens start in the prompt."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One tokenized request; see Submit in protos/engine/v1/engine.proto."""

    request_id: str
    prompt_token_ids: bytes
    """The prompt, followed by the tokens of an engine that was lost; see `pack_uint32`. Packed,
    because it is kept until the request ends."""
    num_resumed_tokens: int = 0
    images: Sequence[PlacedImage] = ()
    """Images in the prompt, in the order of their tokens."""
    sampling: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    """The name of the adapter that computes it; empty for the model itself."""
    adapter_digest: bytes = b""
    """SHA-256 of the adapter's files."""
    caller: str = ""
    traceparent: str = ""
    pool: bool = False
    """Whether the prompt's vector is wanted, and no tokens."""
    deadline_s: float | None = None
    """The deadline in seconds of `time.monotonic()`; None for no limit."""

    @property
    def timeout_ms(self) -> int | None:
        """Milliseconds until the deadline, at least 1; None for no limit.

        Raises:
            DeadlineExpiredError: the deadline has passed.
        """
        if self.deadline_s is None:
            return None
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExpiredError("the request's deadline passed before an engine got it")
        return max(1, int(remaining_s * 1000))


@dataclass(slots=True)
class TokenBatch:
    """New tokens of one request, from one engine step or several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """One entry per token id if the request asked for log-probabilities, else empty."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """One entry per prompt token except the first, in the first batch, if requested."""
    finish_reason: FinishReason | None = None
    """None while the request runs."""
    usage: Usage | None = None
    """The request's usage; set in the last batch."""
    stop_token_id: int | None = None
    """The last token, if it ended the request as a stop token."""
    vector: bytes = b""
    """The prompt's vector, little-endian float32, if the request asked for it."""


class TokenSink(Protocol):
    """Receives one request's output. Nothing follows its end or its error."""

    def put(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs],
        prompt_logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """Appends tokens."""

    def put_admitted(self, weights_version: str) -> None:
        """Notes that the engine has admitted the request, and the version of its weights."""

    def put_finished(self, finished: Finished) -> None:
        """Ends the request successfully."""

    def put_error(self, error: Exception) -> None:
        """Ends the request with an error."""


def read_uint32(data: bytes) -> list[int]:
    """Unpacks little-endian uint32 values."""
    values: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return values


def pack_uint32(values: Sequence[int]) -> bytes:
    """Packs values as little-endian uint32; every value must fit."""
    # Going through array takes a third of NumPy's time for a list of ints.
    return np.array(array("I", values), dtype="<u4").tobytes()


def error_of(failure: Failure) -> Exception:
    """Returns the error of a failed request: an EngineFaultError unless callers may see it."""
    retry_after_ms = failure.retry_after_ms if failure.HasField("retry_after_ms") else None
    match _STATUS_CODES.get(failure.code):
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(failure.message, field=failure.field or None)
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
