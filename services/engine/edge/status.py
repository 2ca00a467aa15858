"""The gRPC status of each error.

UnsupportedError is INVALID_ARGUMENT: clients take UNIMPLEMENTED for a missing method, but the
method exists and the request is unsupported.
"""

import grpc

from protos.common.v1.failure_pb2 import Failure
from services.engine.core.stats import Counters
from services.engine.errors import (
    DeadlineExpiredError,
    DuplicateRequestError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    MemoryExhaustedError,
    NotPermittedError,
    ProfileError,
    QueueFullError,
    RequestFaultError,
    SleepError,
    SlowReaderError,
    UnknownModelError,
    UnknownRequestError,
    UnsupportedError,
)
from services.transport.interceptors import internal_status
from services.transport.status import Status

_INTERNAL = grpc.StatusCode.INTERNAL

STATUS_CODES: dict[type[EngineError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnsupportedError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    NotPermittedError: grpc.StatusCode.PERMISSION_DENIED,
    ProfileError: grpc.StatusCode.FAILED_PRECONDITION,
    SleepError: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MemoryExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RequestFaultError: grpc.StatusCode.INTERNAL,
    EngineUnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: BaseException) -> Status | None:
    """Returns the status of an error for callers; None for an internal error."""
    if not isinstance(error, EngineError):
        return None
    retry_after_ms = error.retry_after_ms if isinstance(error, QueueFullError) else None
    return Status(STATUS_CODES[type(error)], str(error), retry_after_ms)


def failure_of(error: BaseException) -> Failure:
    """Returns the error of one request on a shared stream.

    An internal error is logged and becomes INTERNAL with an id.
    """
    status = status_of(error) or internal_status(error)
    failure = Failure(code=status.code.value[0], message=status.message)
    if isinstance(error, EngineError):
        failure.field = error.field
    if status.retry_after_ms is not None:
        failure.retry_after_ms = status.retry_after_ms
    return failure


def count_rejection(counters: Counters, error: Exception) -> None:
    """Counts a refused request."""
    code = STATUS_CODES[type(error)] if isinstance(error, EngineError) else _INTERNAL
    counters.rejected[code.name] += 1
