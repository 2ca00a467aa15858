"""Converts parsed bodies to the pipeline's types."""

from collections.abc import Sequence
from typing import Any

from services.frontend.engine_client.messages import SamplingParams
from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.generation import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    NamedTool,
    PromptEndFields,
    ResponseFormat,
    TokenizeRequest,
    Tool,
)
from services.frontend.http.fields.structured_output import structured_output_of
from services.frontend.pipeline.prompt_size import MAX_PROMPT_TOKENS
from services.frontend.pipeline.request import Conversation, Options, Prompt, PromptBatch
from services.frontend.pipeline.tools import tool_call_of, tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.prompt_end import PromptEnd

DEFAULT_COMPLETION_TOKENS = 16
"""Default max_tokens of a completion, as in OpenAI's API."""
NO_SEED = -1
"""The same as no seed, as at other servers."""
ALL_THAT_FIT = -1
"""truncate_prompt_tokens that keeps as many tokens as the model takes, as at other servers."""
ALL_TOKENS = -1
"""top_k that keeps all tokens, as at other servers."""

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
    "allowed_token_ids",
    "num_speculative_tokens",
)
"""Fields with the same name and meaning in SamplingParams."""


def completion_prompt(request: CompletionRequest) -> Prompt:
    """Returns the prompt or prompts: text, or token ids used as they are."""
    match request.prompt:
        case [str() | list(), *_] as prompts:
            return PromptBatch(prompts) if len(prompts) > 1 else prompts[0]  # type: ignore[return-value,arg-type]  # texts or lists
        case prompt:
            return prompt  # type: ignore[return-value]  # one text or list of ids


def conversation_of(request: ChatCompletionRequest) -> Conversation:
    """Returns the conversation, without tools if the tool choice is "none".

    Raises:
        InvalidRequestError: a tool call has no name, or a tool choice has no tools.
    """
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not request.tools:
        raise InvalidRequestError(
            "tool_choice demands a call and there are no tools", field="tool_choice"
        )
    wanted = () if request.tool_choice == "none" else request.tools or ()
    tools = [_tool_of(each) for each in wanted]
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    rules = CallRules(
        is_required=bool(named) or choice == "required",
        name=named,
        is_single=bool(wanted) and (bool(named) or request.parallel_tool_calls is False),
        strict=frozenset(each.function.name for each in wanted if each.function.strict),
    )
    messages = [_message_of(each) for each in request.messages]
    end = _prompt_end(request, request.messages)
    if request.echo and end is not PromptEnd.LAST_MESSAGE:
        raise InvalidRequestError(
            "echo repeats the message that the answer continues; it needs continue_final_message",
            field="echo",
        )
    variables = template_variables_of(
        request.chat_template_kwargs,
        request.reasoning_effort,
        request.verbosity,
        field="reasoning_effort",
    )
    return Conversation(
        messages,
        tools,
        rules,
        variables,
        max_reasoning_tokens=request.max_reasoning_tokens,
        end=end,
    )


def tokenized_prompt(request: TokenizeRequest) -> str | Conversation:
    """Returns the text or conversation to be tokenized.

    Raises:
        InvalidRequestError: a tool call has no name, or a text has fields of chats.
    """
    if request.messages is None:
        for field in ("tools", "chat_template_kwargs"):
            if getattr(request, field) is not None:
                raise InvalidRequestError(f"{field} needs messages", field=field)
        _prompt_end(request, ())
        return request.prompt or ""
    return Conversation(
        [_message_of(each) for each in request.messages],
        [_tool_of(each) for each in request.tools or ()],
        template_variables=_given(request.chat_template_kwargs),
        end=_prompt_end(request, request.messages),
    )


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
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    return options_of(
        request,
        request_id,
        num_samples=request.n,
        max_tokens=old if new is None else new,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        response_format=request.response_format,
    )


def options_of(
    request: GenerationFields,
    request_id: str,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    num_samples: int | None = None,
    prompt_logprobs: int | None = None,
    truncate_prompt_tokens: int | None = None,
    response_format: ResponseFormat | None = None,
) -> Options:
    """Returns the options of a request; None counts as absent.

    Raises:
        InvalidRequestError: there is more than one form of output.
    """
    named: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_ON}
    named |= {
        # The engine always samples a token after the prompt; without output it is left out.
        "max_tokens": 1 if max_tokens == 0 else max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    if named["seed"] == NO_SEED:
        named["seed"] = None
    if named["seed"] is not None:
        named["seed"] %= 2**64  # the engine's seeds have no sign
    if named["top_k"] == ALL_TOKENS:
        named["top_k"] = 0
    named["structured_output"] = structured_output_of(request.structured_outputs, response_format)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or ()
    return Options(
        model=request.model,
        request_id=request_id,
        sampling=SamplingParams(
            **{name: value for name, value in named.items() if value is not None}
        ),
        stop=tuple(stop),
        bad_words=tuple(request.bad_words or ()),
        show_stop=bool(request.include_stop_str_in_output),
        show_special_tokens=request.skip_special_tokens is False,
        cache_salt=request.cache_salt or "",
        num_samples=1 if num_samples is None else num_samples,
        has_output=max_tokens != 0,
        parse_special_tokens=request.parse_special_tokens,
        truncate_prompt_tokens=(
            MAX_PROMPT_TOKENS if truncate_prompt_tokens == ALL_THAT_FIT else truncate_prompt_tokens
        ),
    )


def template_variables_of(
    given: dict[str, Any] | None, effort: str | None, verbosity: str | None, *, field: str
) -> dict[str, Any]:
    """Returns the variables for the chat template; `field` has the effort of reasoning.

    Raises:
        InvalidRequestError: the variables have another effort.
    """
    variables = _given(given)
    if effort is not None:
        if variables.get("reasoning_effort", effort) != effort:
            raise InvalidRequestError(
                f"{field} and chat_template_kwargs contradict each other", field=field
            )
        variables["reasoning_effort"] = effort
    if verbosity is not None:
        variables.setdefault("verbosity", verbosity)
    return variables


def _given(variables: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (variables or {}).items() if value is not None}


def _tool_of(tool: Tool) -> Message:
    function = tool.function
    return tool_of(function.name, function.description, function.parameters)


def _prompt_end(request: PromptEndFields, messages: Sequence[ChatMessage]) -> PromptEnd:
    """Returns where the prompt of a conversation ends; without messages, it is a text.

    Raises:
        InvalidRequestError: the fields contradict each other, or are for a conversation.
    """
    if any(each.prefix for each in messages[:-1]):
        raise InvalidRequestError("messages: prefix is for the last message", field="messages")
    continues = bool(request.continue_final_message or (messages and messages[-1].prefix))
    if continues and request.add_generation_prompt:
        raise InvalidRequestError(
            "add_generation_prompt begins a new message and continue_final_message continues the"
            " last one; they exclude each other",
            field="add_generation_prompt",
        )
    if not messages and (continues or request.add_generation_prompt is False):
        field = "continue_final_message" if continues else "add_generation_prompt"
        raise InvalidRequestError(f"{field} needs messages", field=field)
    if continues:
        return PromptEnd.LAST_MESSAGE
    return PromptEnd.MESSAGES if request.add_generation_prompt is False else PromptEnd.ANSWER


def _message_of(message: ChatMessage) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    read: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        read["name"] = message.name
    for reasoning in (message.reasoning_content, message.reasoning):
        if reasoning is not None:
            read["reasoning_content"] = reasoning
    if message.tool_calls:
        read["tool_calls"] = [
            tool_call_of(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read
