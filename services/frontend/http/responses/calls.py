"""Parses bodies of POST /v1/responses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call, form_field
from services.frontend.http.fields.generation import JsonSchema, ResponseFormat
from services.frontend.http.fields.options import options_of, template_variables_of
from services.frontend.http.fields.parse import parse_body
from services.frontend.http.responses.answer_schema import RepeatedFormat, Sampling, Settings
from services.frontend.http.responses.items import listed_items, messages_of
from services.frontend.http.responses.offered_tools import CallName, OfferedTools, offered_tools
from services.frontend.http.responses.schema import (
    LOGPROBS,
    TAGS,
    InputTokensRequest,
    ResponsesRequest,
    SchemaFormat,
)
from services.frontend.http.responses.store import Turn
from services.frontend.http.responses.tool_schema import (
    CustomTool,
    FunctionTool,
    HostedTool,
    NamespaceTool,
)
from services.frontend.pipeline.request import Conversation, Options
from services.frontend.text.chat_template import Message

MAX_SETTING_BYTES = 2**20
"""Limit of the tools, and of the form of the text, that a response repeats in JSON."""

_EMPTY: Message = {"role": "user", "content": ""}
"""The conversation of an empty list of items, which is the same as an empty text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesCall(Call):
    """A parsed body; its prompt is complete only with instructions and the previous turns."""

    new_messages: Sequence[Message]
    """The messages that it adds to the conversation."""
    previous: Turn | None = None
    """The stored turn that they follow."""
    instructions: str | None
    previous_response_id: str | None
    is_truncated: bool
    """Whether turns may be dropped from a conversation that is too long."""
    max_output_tokens: int | None
    is_stored: bool
    input_items: bytes
    """The items as they are listed, in JSON; empty unless they are stored."""
    names: Mapping[str, CallName]
    """The caller's names of tools by the model's."""
    demanded: CallName | None
    """The custom tool whose input is all of the reply."""
    settings: Settings
    """The settings that a response repeats."""
    sampling: Mapping[str, float | None]
    """The fields of sampling that a response repeats."""


def read_response(body: bytes, request_id: str, *, is_strict: bool = False) -> ResponsesCall:
    """Parses a request for a response; see `ReadCall`."""
    request = parse_body(ResponsesRequest, body, is_strict=is_strict, tags=TAGS)
    return _call_of(request, request_id, is_strict=is_strict)


def read_input_tokens(body: bytes, request_id: str, *, is_strict: bool = False) -> ResponsesCall:
    """Parses a request for the number of tokens of a response's input; see `ReadCall`."""
    request = parse_body(InputTokensRequest, body, is_strict=is_strict, tags=TAGS)
    return _call_of(request, request_id, is_strict=is_strict)


def _call_of(request: ResponsesRequest, request_id: str, *, is_strict: bool) -> ResponsesCall:
    offered = offered_tools(request, is_strict=is_strict)
    conversation = _conversation_of(request, offered)
    options = _options_of(request, request_id, offered)
    is_stored = request.store is not False
    form = "tools" if offered.form else form_field(options, request, "structured_outputs", "text")
    return ResponsesCall(
        conversation,
        options,
        bool(request.stream),
        prompt_field="input",
        form_field=form,
        left_out=offered.left_out,
        new_messages=conversation.messages,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        is_truncated=request.truncation == "auto",
        max_output_tokens=request.max_output_tokens,
        is_stored=is_stored,
        input_items=json.dumps(listed_items(request.input)).encode() if is_stored else b"[]",
        names=offered.names,
        demanded=offered.demanded,
        settings=_settings_of(request),
        sampling={name: getattr(request, name) for name in Sampling.__annotations__},
    )


def _conversation_of(request: ResponsesRequest, offered: OfferedTools) -> Conversation:
    effort = None if request.reasoning is None else request.reasoning.effort
    verbosity = None if request.text is None else request.text.verbosity
    messages: Sequence[Message] = messages_of(request.input)
    if not request.input and request.previous_response_id is None:
        messages = [_EMPTY]
    return Conversation(
        messages,
        offered.tools,
        offered.rules,
        template_variables_of(request.chat_template_kwargs, effort, verbosity, field="reasoning"),
        max_reasoning_tokens=request.max_reasoning_tokens,
    )


def _options_of(request: ResponsesRequest, request_id: str, offered: OfferedTools) -> Options:
    has_logprobs = LOGPROBS in (request.include or ())
    if request.top_logprobs and not has_logprobs:
        raise InvalidRequestError(
            f"top_logprobs needs {LOGPROBS!r} in include", field="top_logprobs"
        )
    is_call = offered.rules.is_required or offered.form is not None
    options = options_of(
        request,
        request_id,
        max_tokens=request.max_output_tokens,
        logprobs=(request.top_logprobs or 0) if has_logprobs else None,
        # It is the form of a message, and demanded calls are all of the reply.
        response_format=None if is_call else _format_of(request),
    )
    if offered.form is not None and options.sampling is not None:
        if request.structured_outputs is not None:
            raise InvalidRequestError(
                "a demanded call allows no other form of output", field="structured_outputs"
            )
        options.sampling.structured_output.CopyFrom(offered.form)
    return options


def _format_of(request: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None:
        return None
    if isinstance(wanted, SchemaFormat):
        schema = JsonSchema(name=wanted.name, schema=wanted.schema_, strict=wanted.strict)
        return ResponseFormat(type=wanted.type, json_schema=schema)
    return ResponseFormat(type=wanted.type)


def _settings_of(request: ResponsesRequest) -> Settings:
    """Returns the settings as given, or their defaults."""
    text, reasoning = request.text, request.reasoning
    given = None if text is None else text.format
    form: RepeatedFormat
    if isinstance(given, SchemaFormat):
        form = {
            "type": given.type,
            "name": given.name,
            "description": given.description,
            "schema": given.schema_,
            "strict": bool(given.strict),
        }
    else:
        form = {"type": "text" if given is None else given.type}
    tools = [_shown(each) for each in request.tools or () if not isinstance(each, HostedTool)]
    choice: Any = request.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = choice.model_dump(exclude_none=True)
    _check_repeatable("tools", tools)
    _check_repeatable("text", form)
    return {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": form, "verbosity": (text and text.verbosity) or "medium"},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "truncation": request.truncation or "disabled",
        "top_logprobs": request.top_logprobs or 0,
        "metadata": request.metadata or {},
        "background": False,
        "service_tier": "default",
        "prompt_cache_key": request.prompt_cache_key,
        "safety_identifier": request.safety_identifier,
        "user": request.user,
    }


def _shown(tool: FunctionTool | CustomTool | NamespaceTool) -> Any:
    """Returns a tool as a response repeats it."""
    if not isinstance(tool, FunctionTool):
        return tool.model_dump(exclude_none=True)
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _check_repeatable(name: str, setting: Any) -> None:
    """Refuses a setting that is large, or that JSON cannot hold, such as 1e999."""
    try:
        num_bytes = len(json.dumps(setting, allow_nan=False))
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{name} cannot be written as JSON", field=name) from None
    if num_bytes > MAX_SETTING_BYTES:
        raise InvalidRequestError(
            f"{name} has {num_bytes} bytes of JSON; the limit is {MAX_SETTING_BYTES}", field=name
        )
