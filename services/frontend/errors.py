"""Everything that can go wrong with a request, as far as its caller may know.

FrontendError
├── UnauthenticatedError      there is no API key, or it is not known
├── NotPermittedError         the API key is not one for this
├── InvalidRequestError       the request itself is wrong
├── UnknownModelError         another model was asked for
├── DuplicateRequestError     its id or handle is taken by a live request
├── OverloadedError           too many requests are unfinished
├── SlowReaderError           the caller did not read its output
├── EngineUnavailableError    no engine takes the request, or the one that had it is lost
└── DeadlineExpiredError      its time ran out

`services.frontend.rpc.status` maps each to a gRPC status, `services.frontend.http.status` to one of
HTTP; tests check that none is missing.
"""


class FrontendError(Exception):
    """Base of all errors whose message is meant for the caller."""

    retry_after_ms: int | None = None
    """When trying again makes sense; None says nothing about it."""


class UnauthenticatedError(FrontendError):
    """The caller shows no API key, or one that is not known any more."""


class NotPermittedError(FrontendError):
    """The caller's API key is known, and not one for what was asked."""


class InvalidRequestError(FrontendError):
    """The request can never be served as it is."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        """Says what is wrong, and in which field of the request where that is known."""
        super().__init__(message)
        self.field = field


class UnknownModelError(FrontendError):
    """The request names a model that is not served here."""


class DuplicateRequestError(FrontendError):
    """The request's id or handle belongs to a request that is still live."""


class OverloadedError(FrontendError):
    """Too many requests are unfinished; trying again later makes sense."""

    def __init__(self, message: str, *, retry_after_ms: int | None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SlowReaderError(FrontendError):
    """The caller left its output unread for too long."""


class EngineUnavailableError(FrontendError):
    """No engine takes requests now, or the one that had the request is lost."""

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExpiredError(FrontendError):
    """The request's time limit passed before it was finished."""


class EngineFaultError(Exception):
    """The engine failed in a way that callers may not see. Becomes INTERNAL, details in the log."""
