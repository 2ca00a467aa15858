"""Parses bodies of requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.generation import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
    parse_body,
)
from services.frontend.http.fields.options import (
    chat_options,
    completion_options,
    completion_prompt,
    conversation_of,
    tokenized_prompt,
)
from services.frontend.pipeline.request import Options, Prompt


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed body."""

    prompt: Prompt
    options: Options
    is_stream: bool
    includes_usage: bool
    tells_prompt: bool
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall(Call):
    """A parsed body whose prompt is to be tokenized."""

    add_special_tokens: bool | None
    """Whether the tokenizer adds special tokens; None means to text alone."""
    returns_texts: bool
    """Whether the text of each token is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall(Call):
    """A parsed body with token ids whose text is wanted."""

    token_ids: list[int]


def form_field(options: Options, body: object, *names: str) -> str:
    """Returns which of a body's fields decides the form of the output: if none, the tools do."""
    if options.sampling is None or not options.sampling.HasField("structured_output"):
        return "tools"
    return next(name for name in names if getattr(body, name) is not None)


class ReadCall(Protocol):
    """Parses bodies of one kind."""

    def __call__(self, body: bytes, request_id: str, *, is_strict: bool) -> Call:
        """Parses a body, given the request's id.

        With `is_strict` fields that nothing here can follow are refused.

        Raises:
            InvalidRequestError: it is invalid.
        """


def read_completion(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a completion.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse(CompletionRequest, body, is_strict=is_strict)
    options = completion_options(request, request_id)
    return Call(
        completion_prompt(request),
        options,
        bool(request.stream),
        request.includes_usage,
        request.prompt_logprobs is not None,
        bool(request.echo),
        request.counts_usage,
        prompt_field="prompt",
        form_field=form_field(options, request, "structured_outputs", "response_format"),
    )


def read_chat(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a chat completion.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse(ChatCompletionRequest, body, is_strict=is_strict)
    options = chat_options(request, request_id)
    return Call(
        conversation_of(request),
        options,
        bool(request.stream),
        request.includes_usage,
        request.prompt_logprobs is not None,
        bool(request.echo),
        request.counts_usage,
        form_field=form_field(options, request, "structured_outputs", "response_format"),
    )


def read_tokenize(body: bytes, request_id: str, *, is_strict: bool = False) -> TokenizeCall:
    """Parses a request for the token ids of a prompt.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(TokenizeRequest, body, is_strict=is_strict)
    return TokenizeCall(
        tokenized_prompt(request),
        Options(
            model=request.model or "",
            request_id=request_id,
            parse_special_tokens=request.parse_special_tokens,
        ),
        is_stream=False,
        includes_usage=False,
        tells_prompt=False,
        prompt_field="prompt" if request.messages is None else "messages",
        add_special_tokens=request.add_special_tokens,
        returns_texts=bool(request.return_token_strs),
    )


def read_detokenize(body: bytes, request_id: str, *, is_strict: bool = False) -> DetokenizeCall:
    """Parses a request for the text of token ids.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(DetokenizeRequest, body, is_strict=is_strict)
    return DetokenizeCall(
        "",
        Options(model=request.model or "", request_id=request_id),
        is_stream=False,
        includes_usage=False,
        tells_prompt=False,
        prompt_field="tokens",
        token_ids=request.tokens,
    )
