"""Converts parsed bodies to the pipeline's types."""

from typing import Any

from services.frontend.engine_client.messages import SamplingParams
from services.frontend.errors import InvalidRequestError
from services.frontend.http.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    NamedTool,
    ResponseFormat,
    SharedFields,
)
from services.frontend.http.structured_output import structured_output_of
from services.frontend.pipeline.request import Conversation, Options, Prompt
from services.frontend.pipeline.tools import tool_call_of, tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message

DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API."""

_PASSED_ON = (
    "temperature",
    "top_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)
"""Fields with the same name and meaning in SamplingParams."""


def completion_prompt(request: CompletionRequest) -> Prompt:
    """Returns the prompt: text, or token ids used as they are."""
    match request.prompt:
        case [str(text)]:
            return text
        case prompt:
            return prompt  # type: ignore[return-value]  # a list of text has one entry


def conversation_of(request: ChatCompletionRequest) -> Conversation:
    """Returns the conversation, without tools if the tool choice is "none".

    Raises:
        InvalidRequestError: a tool call's arguments are not JSON, or a tool choice has no tools.
    """
    choice = request.tool_choice
    for field in ("tool_choice", "parallel_tool_calls"):
        if getattr(request, field) is not None and request.tools is None:
            raise InvalidRequestError(f"{field} needs tools", field=field)
    wanted = () if request.tool_choice == "none" else request.tools or ()
    tools = [
        tool_of(each.function.name, each.function.description, each.function.parameters)
        for each in wanted
    ]
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    rules = CallRules(
        is_required=bool(named) or choice == "required",
        name=named,
        is_single=bool(wanted) and (bool(named) or request.parallel_tool_calls is False),
        strict=frozenset(each.function.name for each in wanted if each.function.strict),
    )
    messages = [_message_of(each) for each in request.messages]
    variables = _template_variables(request)
    return Conversation(messages, tools, rules, variables, request.max_reasoning_tokens)


def completion_options(request: CompletionRequest, request_id: str) -> Options:
    """Returns the options of a completion.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    max_tokens = request.max_tokens
    tells_prompt = bool(request.echo) and request.logprobs is not None
    if tells_prompt and request.n not in (None, 1):
        raise InvalidRequestError("echo with logprobs takes n of 1", field="echo")
    if tells_prompt and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs already returns the prompt's; leave prompt_logprobs out",
            field="prompt_logprobs",
        )
    return _options(
        request,
        request_id,
        max_tokens=DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if tells_prompt else request.prompt_logprobs,
    )


def chat_options(request: ChatCompletionRequest, request_id: str) -> Options:
    """Returns the options of a chat completion.

    Raises:
        InvalidRequestError: two fields contradict each other.
    """
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them",
            field="max_tokens",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    return _options(
        request,
        request_id,
        max_tokens=old if new is None else new,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        response_format=request.response_format,
    )


def _options(
    request: SharedFields,
    request_id: str,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    response_format: ResponseFormat | None = None,
) -> Options:
    named: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    named |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    named["structured_output"] = structured_output_of(request.structured_outputs, response_format)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return Options(
        model=request.model,
        request_id=request_id,
        sampling=SamplingParams(
            **{name: value for name, value in named.items() if value is not None}
        ),
        stop=tuple(stop),
        cache_salt=request.cache_salt or "",
        num_samples=1 if request.n is None else request.n,
        parse_special_tokens=request.parse_special_tokens,
    )


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    given = request.chat_template_kwargs or {}
    variables = {name: value for name, value in given.items() if value is not None}
    effort = request.reasoning_effort
    if effort is not None:
        if variables.get("reasoning_effort", effort) != effort:
            raise InvalidRequestError(
                "reasoning_effort and chat_template_kwargs contradict each other",
                field="reasoning_effort",
            )
        variables["reasoning_effort"] = effort
    return variables


def _message_of(message: ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    read: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning_content is not None:
        read["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        read["tool_calls"] = [
            tool_call_of(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read
