"""Parses bodies of POST /v1/completions."""

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call, form_field
from services.frontend.http.completions.schema import CompletionRequest
from services.frontend.http.fields.generation import parse
from services.frontend.http.fields.options import options_of
from services.frontend.pipeline.request import Options, Prompt, PromptBatch

DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API."""


def read_completion(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a completion; see `ReadCall`."""
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


def completion_prompt(request: CompletionRequest) -> Prompt:
    """Returns the prompt or prompts: text, or token ids used as they are."""
    match request.prompt:
        case [str() | list(), *_] as prompts:
            return PromptBatch(prompts) if len(prompts) > 1 else prompts[0]  # type: ignore[return-value,arg-type]  # texts or lists
        case prompt:
            return prompt  # type: ignore[return-value]  # one text or list of ids


def completion_options(request: CompletionRequest, request_id: str) -> Options:
    """Returns the options of a completion.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise InvalidRequestError("max_tokens of 0 is for echo only", field="max_tokens")
    if request.best_of not in (None, request.n or 1):
        raise InvalidRequestError(
            f"best_of is {request.best_of} with n of {request.n or 1}; choosing among outputs is"
            " not supported",
            field="best_of",
        )
    tells_prompt = bool(request.echo) and request.logprobs is not None
    if tells_prompt and request.n not in (None, 1):
        raise InvalidRequestError("echo with logprobs takes n of 1", field="echo")
    if tells_prompt and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs already returns the prompt's; leave prompt_logprobs out",
            field="prompt_logprobs",
        )
    return options_of(
        request,
        request_id,
        num_samples=request.n,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if tells_prompt else request.prompt_logprobs,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        response_format=request.response_format,
    )
