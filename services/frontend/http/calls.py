"""Parses bodies of the two model endpoints."""

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.http.convert import (
    chat_options,
    completion_options,
    completion_prompt,
    conversation_of,
)
from services.frontend.http.schema import ChatCompletionRequest, CompletionRequest, parse
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
    )
