"""Everything that can go wrong with a request, as far as its caller may know.

FrontendError
├── UnauthenticatedError      there is no API key, or it is not known
├── NotPermittedError         the API key is not one for this
├── InvalidRequestError       the request itself is wrong
├── UnknownModelError         another model was asked for
├── UnknownResponseError      a response was asked for that is not stored
├── UnknownRequestError       no request of the caller's with this id is remembered
├── DuplicateRequestError     its id or handle is taken by a live request
├── OverloadedError           too many requests are unfinished
├── SlowReaderError           the caller did not read its output
├── EngineUnavailableError    no engine takes the request, or the one that had it is lost
└── DeadlineExpiredError      its time ran out

`services.frontend.rpc.status` maps each to a gRPC status, `services.frontend.http.wire.status` to
one of HTTP; tests check that none is missing.
"""


class FrontendError(Exception):
    """Base of all errors whose message is for the caller."""

    retry_after_ms: int | None = None
    """When to retry; None if unknown."""


class UnauthenticatedError(FrontendError):
    """The API key is missing or unknown."""


class NotPermittedError(FrontendError):
    """The API key does not permit the request."""


class InvalidRequestError(FrontendError):
    """The request can never be served as it is."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        is_field_ours: bool = True,
        code: str | None = None,
    ) -> None:
        """Takes the message, and the wrong field if known.

        is_field_ours: whether the field is one of the API's; another name is the client's text.
        code: OpenAI's name of the mistake, if it has one.
        """
        super().__init__(message)
        self.field = field
        self.code = code
        self.is_field_ours = is_field_ours


class UnknownModelError(FrontendError):
    """The request names a model that is not served."""


class UnknownResponseError(FrontendError):
    """The request names a response that is not stored, or that is another caller's."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        """Takes the message, and the field of the body that names it, if any."""
        super().__init__(message)
        self.field = field


class UnknownRequestError(FrontendError):
    """No live or recent request of the caller has the id that was asked for."""


class DuplicateRequestError(FrontendError):
    """The request's id or handle belongs to a live request."""


class OverloadedError(FrontendError):
    """Too many requests are unfinished; a later retry may succeed."""

    def __init__(self, message: str, *, retry_after_ms: int | None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SlowReaderError(FrontendError):
    """The caller left its output unread for too long."""


class EngineUnavailableError(FrontendError):
    """No engine accepts requests now, or the request's engine was lost."""

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class DeadlineExpiredError(FrontendError):
    """The request's deadline passed before its end."""


class EngineFaultError(Exception):
    """The engine failed for an internal reason. Becomes INTERNAL; the log has details."""
