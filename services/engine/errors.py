"""Everything that can go wrong with a request, as far as its caller may know.

EngineError
├── InvalidRequestError       the request itself is wrong
├── UnsupportedError          the request asks for something this engine does not do
├── UnknownModelError         another model was asked for
├── UnknownRequestError       no live or recent request has the id
├── DuplicateRequestError     its id is taken by a live request
├── NotPermittedError         the operator does not allow it
├── ProfileError              no profile can be started or stopped now
├── SleepError                the engine cannot fall asleep now
├── QueueFullError            too many requests wait
├── SlowReaderError           the caller did not read its output
├── EngineUnavailableError    starting, draining or restarting
├── MemoryExhaustedError      not even one token of it fits into the device's memory
├── RequestFaultError         it made the model or its worker fail
└── DeadlineExpiredError      its time ran out

`services.engine.edge.status` maps each to a gRPC status; a test checks that none is missing.
"""

import uuid


class EngineError(Exception):
    """Base of all errors whose message is meant for the caller."""

    def __init__(self, message: str, *, field: str = "") -> None:
        """Takes the message, and the field of the request that is to blame, if one is."""
        super().__init__(message)
        self.field = field


class InvalidRequestError(EngineError):
    """The request can never be served."""


class UnsupportedError(EngineError):
    """The request uses a field or feature that this engine lacks."""


class UnknownModelError(EngineError):
    """The request names a model that is not served here."""


class UnknownRequestError(EngineError):
    """No live or recent request has the id that was asked for."""


class DuplicateRequestError(EngineError):
    """A live request has the same id."""


class NotPermittedError(EngineError):
    """The operator does not allow the request."""


class ProfileError(EngineError):
    """A profile cannot be started or stopped in the present state, or gave no trace."""


class SleepError(EngineError):
    """The engine cannot fall asleep in the present state."""


class QueueFullError(EngineError):
    """The waiting queue is full; the caller may try again later."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SlowReaderError(EngineError):
    """The caller left its output unread for too long."""


class EngineUnavailableError(EngineError):
    """The engine takes no requests now, or lost this one."""


class MemoryExhaustedError(EngineError):
    """The device has no memory for a step of one token of the request."""


class RequestFaultError(EngineError):
    """The request made the model or its worker fail; it is not retried.

    The message is an id; the log has the details under it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.error_id = uuid.uuid4().hex[:12]
        super().__init__(f"internal error {self.error_id}")


class DeadlineExpiredError(EngineError):
    """The request's time limit passed before its end."""
