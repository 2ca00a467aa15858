"""Failures of accepted calls, as the last message of their stream."""

from protos.openengine.v1 import openengine_pb2
from protos.openengine.v1.openengine_pb2 import EngineError as EngineErrorMessage
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

ERROR_CODES: dict[type[EngineError], openengine_pb2.ErrorCode] = {
    InvalidRequestError: openengine_pb2.ERROR_CODE_INVALID_ARGUMENT,
    UnsupportedError: openengine_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    NotPermittedError: openengine_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    ProfileError: openengine_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    SleepError: openengine_pb2.ERROR_CODE_UNSUPPORTED_FEATURE,
    UnknownModelError: openengine_pb2.ERROR_CODE_MODEL_NOT_FOUND,
    UnknownRequestError: openengine_pb2.ERROR_CODE_REQUEST_NOT_FOUND,
    DuplicateRequestError: openengine_pb2.ERROR_CODE_DUPLICATE_REQUEST,
    QueueFullError: openengine_pb2.ERROR_CODE_OVERLOADED,
    SlowReaderError: openengine_pb2.ERROR_CODE_OVERLOADED,
    MemoryExhaustedError: openengine_pb2.ERROR_CODE_OVERLOADED,
    EngineUnavailableError: openengine_pb2.ERROR_CODE_DRAINING,
    DeadlineExpiredError: openengine_pb2.ERROR_CODE_CANCELLED,
    RequestFaultError: openengine_pb2.ERROR_CODE_INTERNAL,
}
"""The protocol has no code for an engine that has lost its worker; draining is the nearest."""
_RETRYABLE = (QueueFullError, SlowReaderError, MemoryExhaustedError, EngineUnavailableError)


def failure_to_proto(error: EngineError) -> EngineErrorMessage:
    """Returns the message of an error."""
    message = EngineErrorMessage(
        code=ERROR_CODES[type(error)],
        message=str(error),
        retryable=isinstance(error, _RETRYABLE),
    )
    if isinstance(error, QueueFullError):
        message.retry_after_ms = error.retry_after_ms
    return message
