"""Parses bodies of requests."""

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.http.convert import (
    chat_options,
    completion_options,
    completion_prompt,
    conversation_of,
    tokenized_prompt,
)
from services.frontend.http.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
    parse_body,
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


ReadCall = Callable[[bytes, str], Call]
"""Parses a body, given the request's id; raises InvalidRequestError."""


def read_completion(body: bytes, request_id: str) -> Call:
    """Parses a completion.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse(CompletionRequest, body)
    return Call(
        completion_prompt(request),
        completion_options(request, request_id),
        bool(request.stream),
        request.includes_usage,
        request.prompt_logprobs is not None,
        bool(request.echo),
        request.counts_usage,
    )


def read_chat(body: bytes, request_id: str) -> Call:
    """Parses a chat completion.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse(ChatCompletionRequest, body)
    return Call(
        conversation_of(request),
        chat_options(request, request_id),
        bool(request.stream),
        request.includes_usage,
        request.prompt_logprobs is not None,
        bool(request.echo),
        request.counts_usage,
    )


def read_tokenize(body: bytes, request_id: str) -> TokenizeCall:
    """Parses a request for the token ids of a prompt.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(TokenizeRequest, body)
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
        add_special_tokens=request.add_special_tokens,
        returns_texts=bool(request.return_token_strs),
    )


def read_detokenize(body: bytes, request_id: str) -> DetokenizeCall:
    """Parses a request for the text of token ids.

    Raises:
        InvalidRequestError: it is invalid.
    """
    request = parse_body(DetokenizeRequest, body)
    return DetokenizeCall(
        "",
        Options(model=request.model or "", request_id=request_id),
        is_stream=False,
        includes_usage=False,
        tells_prompt=False,
        token_ids=request.tokens,
    )
