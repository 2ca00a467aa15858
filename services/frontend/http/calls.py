"""A body of one of the two endpoints that run the model, as what the pipeline takes."""

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
    """A body that was read."""

    prompt: Prompt
    options: Options
    is_stream: bool
    includes_usage: bool
    tells_prompt: bool
    """Whether log-probabilities of the prompt are wanted on their own."""
    has_echo: bool = False


ReadCall = Callable[[bytes, str], Call]
"""Reads a body, given the request's id; raises InvalidRequestError."""


def read_completion(body: bytes, request_id: str) -> Call:
    """Reads the body of a completion.

    Raises:
        InvalidRequestError: it cannot be served as it is.
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
    """Reads the body of a chat completion.

    Raises:
        InvalidRequestError: it cannot be served as it is.
    """
    request = parse(ChatCompletionRequest, body)
    return Call(
        conversation_of(request),
        chat_options(request, request_id),
        bool(request.stream),
        request.includes_usage,
        request.prompt_logprobs is not None,
    )
