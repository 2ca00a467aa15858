"""A parsed body, whatever its API."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request import Options, Prompt


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body."""

    prompt: Prompt
    options: Options
    is_stream: bool = False
    includes_usage: bool = False
    tells_prompt: bool = False
    """Whether log-probabilities of the prompt are wanted as a separate field."""
    has_echo: bool = False
    counts_usage: bool = False
    """Whether each chunk has the usage up to it."""
    prompt_field: str = "messages"
    """The body's field with the prompt."""
    form_field: str = "tools"
    """The body's field that decides the form of the output."""
    left_out: Sequence[str] = ()
    """Kinds of hosted tools that the model does not get; see `check_hosted`."""

    @contextmanager
    def naming_fields(self) -> Iterator[None]:
        """Gives a refusal by the pipeline or the engine the name of the field in the body."""
        try:
            yield
        except InvalidRequestError as error:
            own_names = {
                "prompt": self.prompt_field,
                "prompt_token_ids": self.prompt_field,
                "structured_output": self.form_field,
            }
            if error.field not in own_names:
                raise
            name = own_names[error.field]
            raise InvalidRequestError(str(error), field=name, code=error.code) from None


def form_field(options: Options, body: object, *names: str) -> str:
    """Returns which of a body's fields decides the form of the output: if none, the tools do."""
    if options.sampling is None or not options.sampling.HasField("structured_output"):
        return "tools"
    return next(name for name in names if getattr(body, name) is not None)


AnyCall = TypeVar("AnyCall", bound=Call)
_Read = TypeVar("_Read", bound=Call, covariant=True)


class ReadCall(Protocol[_Read]):
    """Parses bodies of one kind."""

    def __call__(self, body: bytes, request_id: str, *, is_strict: bool) -> _Read:
        """Parses a body, given the request's id.

        With `is_strict` fields that nothing here can follow are refused.

        Raises:
            InvalidRequestError: it is invalid.
        """
