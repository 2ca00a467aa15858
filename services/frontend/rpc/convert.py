"""Converts between protobuf and the pipeline's types."""

import uuid
from typing import Any

from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.common.v1.sampling_pb2 import FinishReason
from protos.frontend.v1 import frontend_pb2
from services.frontend.engine_client.pool import EnginePool
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.image_files import ImageFile, image_content
from services.frontend.pipeline.prompt_size import check_json_texts, check_num_tokens
from services.frontend.pipeline.request import MAX_MESSAGES, Conversation, Options, Output, Prompt
from services.frontend.pipeline.tools import json_object, tool_call_of, tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.content_parts import Content, joined
from services.frontend.text.prompt_end import PromptEnd
from services.telemetry.trace_context import checked_traceparent

_PROMPT_ENDS = {
    frontend_pb2.PROMPT_END_UNSPECIFIED: PromptEnd.ANSWER,
    frontend_pb2.PROMPT_END_MESSAGES: PromptEnd.MESSAGES,
    frontend_pb2.PROMPT_END_LAST_MESSAGE: PromptEnd.LAST_MESSAGE,
}
_GOES_ON = FinishReason.FINISH_REASON_UNSPECIFIED


def refuse_unknown_fields(message: ProtobufMessage) -> None:
    """Raises InvalidRequestError if a message has an unknown field at any depth.

    Ignoring a field would silently ignore a caller's wish.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequestError(
            f"{message.DESCRIPTOR.name} has the field {unknown[0].field_number},"
            " which this frontend does not know"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        # Check the length first: a message can hold millions of empty entries.
        if field.is_repeated and len(value) > MAX_MESSAGES:
            raise InvalidRequestError(
                f"{field.name} has {len(value)} entries; the limit is {MAX_MESSAGES}"
            )
        for child in value if field.is_repeated else (value,):
            refuse_unknown_fields(child)


def options_of(options: frontend_pb2.GenerationOptions) -> Options:
    """Reads options, and makes a request id if there is none."""
    return Options(
        model=options.model,
        request_id=options.request_id or uuid.uuid4().hex,
        sampling=options.sampling if options.HasField("sampling") else None,
        stop=tuple(options.stop),
        bad_words=tuple(options.bad_words),
        priority=options.priority,
        cache_salt=options.cache_salt,
        show_special_tokens=options.show_special_tokens,
        show_stop=options.show_stop,
        num_samples=options.n if options.HasField("n") else 1,
        parse_special_tokens=parse_special_tokens_of(options),
        truncate_prompt_tokens=(
            options.truncate_prompt_tokens if options.HasField("truncate_prompt_tokens") else None
        ),
        traceparent=checked_traceparent(options.traceparent),
    )


def parse_special_tokens_of(
    source: frontend_pb2.GenerationOptions | frontend_pb2.TokenizeRequest,
) -> bool | None:
    """Reads whether spellings of special tokens count; None leaves it to the kind of prompt."""
    return source.parse_special_tokens if source.HasField("parse_special_tokens") else None


def prompt_of(request: frontend_pb2.GenerateRequest, *, max_tokens: int) -> Prompt:
    """Reads a prompt. An absent one is empty, which the pipeline refuses.

    One that is to be cut keeps its last `max_tokens`.

    Raises:
        InvalidRequestError: it has `max_tokens` token ids or more.
    """
    if request.WhichOneof("prompt") == "tokens":
        ids = request.tokens.ids
        if request.options.HasField("truncate_prompt_tokens"):
            return list(ids[-max_tokens:])
        check_num_tokens(len(ids), max_tokens)
        return list(ids)
    return request.text


def conversation_of(source: frontend_pb2.ChatRequest | frontend_pb2.Conversation) -> Conversation:
    """Reads a conversation.

    Raises:
        InvalidRequestError: it has invalid JSON, or too many values.
    """
    check_json_texts((tool.parameters for tool in source.tools), "the parameters of tools")
    check_json_texts(
        (call.arguments for message in source.messages for call in message.tool_calls),
        "the arguments of tool calls",
    )
    tools = [
        tool_of(
            tool.name,
            tool.description,
            json_object(tool.parameters, f"parameters of the tool {tool.name[:64]!r}")
            if tool.HasField("parameters")
            else None,
        )
        for tool in source.tools
    ]
    messages = [_message_of(message) for message in source.messages]
    rules, max_reasoning_tokens = CallRules(), None
    if isinstance(source, frontend_pb2.ChatRequest):
        rules = _call_rules(source)
        if source.HasField("max_reasoning_tokens"):
            max_reasoning_tokens = source.max_reasoning_tokens
        tools = [] if source.tool_use == frontend_pb2.TOOL_USE_NONE else tools
    return Conversation(
        messages,
        tools,
        rules,
        _template_variables(source),
        max_reasoning_tokens=max_reasoning_tokens,
        end=_prompt_end(source),
    )


def _call_rules(request: frontend_pb2.ChatRequest) -> CallRules:
    """Reads the rules for calls.

    Raises:
        InvalidRequestError: they contradict each other, or there are no tools.
    """
    if request.tool_use not in frontend_pb2.ToolUse.values():
        raise InvalidRequestError(f"tool_use is {request.tool_use}, which this frontend lacks")
    is_off = request.tool_use == frontend_pb2.TOOL_USE_NONE
    if is_off and request.required_tool:
        raise InvalidRequestError("tool_use is none and required_tool names a tool")
    for field in ("tool_use", "required_tool", "parallel_tool_calls"):
        is_given = field in (given.name for given, _ in request.ListFields())
        if is_given and not request.tools:
            raise InvalidRequestError(f"{field} needs tools", field=field)
    may_repeat = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return CallRules(
        is_required=bool(
            request.tool_use == frontend_pb2.TOOL_USE_REQUIRED or request.required_tool
        ),
        name=request.required_tool,
        is_single=not is_off and (bool(request.required_tool) or not may_repeat),
        strict=frozenset(tool.name for tool in request.tools if tool.strict and not is_off),
    )


def _template_variables(
    source: frontend_pb2.ChatRequest | frontend_pb2.Conversation,
) -> dict[str, Any]:
    if not source.HasField("template_variables"):
        return {}
    check_json_texts([source.template_variables], "the template_variables")
    return json_object(source.template_variables, "template_variables")


def _prompt_end(source: frontend_pb2.ChatRequest | frontend_pb2.Conversation) -> PromptEnd:
    end = _PROMPT_ENDS.get(source.prompt_end)
    if end is None:
        raise InvalidRequestError(f"prompt_end is {source.prompt_end}, which this frontend lacks")
    return end


def _message_of(message: frontend_pb2.ChatMessage) -> Message:
    content: Content = message.content
    if message.parts:
        if message.content:
            raise InvalidRequestError(
                "a message has content and parts; it must have one of them", field="messages"
            )
        content = joined(map(_content_of, message.parts))
    read: dict[str, Any] = {"role": message.role, "content": content}
    if message.HasField("reasoning"):
        read["reasoning_content"] = message.reasoning
    if message.tool_calls:
        read["content"] = content or None
        read["tool_calls"] = [
            tool_call_of(call.id, call.name, call.arguments) for call in message.tool_calls
        ]
    if message.HasField("tool_call_id"):
        read["tool_call_id"] = message.tool_call_id
    return read


def _content_of(part: frontend_pb2.ContentPart) -> Content:
    kind = part.WhichOneof("part")
    if kind == "text":
        return part.text
    if not (part.image or part.image_url):
        raise InvalidRequestError("a part of a message is empty", field="messages")
    return image_content(ImageFile(data=part.image, url=part.image_url))


def input_of(request: frontend_pb2.TokenizeRequest) -> str | Conversation:
    """Reads the input to tokenize.

    Raises:
        InvalidRequestError: it is absent.
    """
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "conversation":
            return conversation_of(request.conversation)
    raise InvalidRequestError("neither text nor a conversation is given")


def output_to_proto(output: Output) -> frontend_pb2.Output:
    """Converts output."""
    return frontend_pb2.Output(
        request_id=output.request_id,
        index=output.index,
        text=output.text,
        reasoning=output.reasoning,
        tool_calls=[
            frontend_pb2.ToolCallPiece(
                index=call.index, id=call.call_id, name=call.name, arguments=call.arguments
            )
            for call in output.calls
        ],
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=_GOES_ON if output.finish_reason is None else output.finish_reason,
        stop_string=output.stop_string,
        stop_token_id=output.stop_token_id,
        usage=output.usage,
    )


def engines_to_proto(pool: EnginePool) -> frontend_pb2.ListEnginesResponse:
    """Converts the state of the engines."""
    response = frontend_pb2.ListEnginesResponse(
        num_retries=pool.counts.num_retries, num_migrations=pool.counts.num_migrations
    )
    for engine in pool.engines:
        view = engine.view
        response.engines.add(
            address=engine.address.target,
            ready=not engine.reason,
            reason=engine.reason,
            engine_id="" if engine.info is None else engine.info.engine_id,
            num_live=engine.num_live,
            num_running=view.heartbeat.num_running,
            num_waiting=view.heartbeat.num_waiting,
            num_known_prefixes=view.num_known_prefixes,
        )
    return response
