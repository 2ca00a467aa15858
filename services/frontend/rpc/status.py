"""The gRPC status of each error."""

import grpc

from protos.common.v1.failure_pb2 import Failure
from services.frontend.errors import (
    DeadlineExpiredError,
    DuplicateRequestError,
    EngineUnavailableError,
    FrontendError,
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    SlowReaderError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownRequestError,
    UnknownResponseError,
)
from services.transport.interceptors import internal_status
from services.transport.status import Status

STATUS_CODES: dict[type[FrontendError], grpc.StatusCode] = {
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    NotPermittedError: grpc.StatusCode.PERMISSION_DENIED,
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnknownRequestError: grpc.StatusCode.NOT_FOUND,
    UnknownResponseError: grpc.StatusCode.NOT_FOUND,
    DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EngineUnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExpiredError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: BaseException) -> Status | None:
    """Returns the status of an error for callers; None for an internal error."""
    if not isinstance(error, FrontendError):
        return None
    return Status(STATUS_CODES[type(error)], str(error), error.retry_after_ms)


def failure_of(error: BaseException) -> Failure:
    """Returns the error of one request on a shared stream.

    An internal error is logged and becomes INTERNAL with an id.
    """
    status = status_of(error) or internal_status(error)
    return Failure(
        code=status.code.value[0], message=status.message, retry_after_ms=status.retry_after_ms
    )
