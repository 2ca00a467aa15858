"""Parses bodies of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call, form_field
from services.frontend.http.chat.schema import (
    TAGS,
    ChatCompletionRequest,
    ChatMessage,
    ImageUrlPart,
    NamedTool,
    PromptEndFields,
    TextPart,
    Tool,
)
from services.frontend.http.fields.generation import parse
from services.frontend.http.fields.images import image_of_url
from services.frontend.http.fields.options import options_of, template_variables_of
from services.frontend.pipeline.request import Conversation, Options
from services.frontend.pipeline.tools import tool_call_of, tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.content_parts import Content, joined
from services.frontend.text.prompt_end import PromptEnd


def read_chat(body: bytes, request_id: str, *, is_strict: bool = False) -> Call:
    """Parses a chat completion; see `ReadCall`."""
    request = parse(ChatCompletionRequest, body, is_strict=is_strict, tags=TAGS)
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
    tools = [tool_entry(each) for each in wanted]
    named = choice.function.name if isinstance(choice, NamedTool) else ""
    rules = CallRules(
        is_required=bool(named) or choice == "required",
        name=named,
        is_single=bool(wanted) and (bool(named) or request.parallel_tool_calls is False),
        strict=frozenset(each.function.name for each in wanted if each.function.strict),
    )
    messages = [message_of(each) for each in request.messages]
    end = prompt_end(request, request.messages)
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


def tool_entry(tool: Tool) -> Message:
    """Returns a tool as chat templates have it."""
    function = tool.function
    return tool_of(function.name, function.description, function.parameters)


def prompt_end(request: PromptEndFields, messages: Sequence[ChatMessage]) -> PromptEnd:
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


def message_of(message: ChatMessage) -> Message:
    """Returns a message as chat templates have it."""
    content = message.content
    read: dict[str, Any] = {
        "role": message.role,
        "content": joined(map(_content_of, content)) if isinstance(content, list) else content,
    }
    if message.name is not None:
        read["name"] = message.name
    for reasoning in (message.reasoning_content, message.reasoning):
        if reasoning is not None:
            read["reasoning_content"] = reasoning
    if message.tool_calls:
        read["tool_calls"] = [
            tool_call_of(call.id, call.function.name, call.function.arguments or "")
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    return read


def _content_of(part: TextPart | ImageUrlPart) -> Content:
    if isinstance(part, TextPart):
        return part.text
    return image_of_url(part.image_url.url, part.image_url.detail, field="messages")
