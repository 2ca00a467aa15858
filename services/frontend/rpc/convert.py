"""Converts between protobuf and the pipeline's types."""

import uuid
from typing import Any

from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.common.v1.sampling_pb2 import FinishReason
from protos.frontend.v1 import frontend_pb2
from services.frontend.engine_client.pool import EnginePool
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.prompt_size import check_json_texts, check_num_tokens
from services.frontend.pipeline.request import MAX_MESSAGES, Conversation, Options, Output, Prompt
from services.frontend.pipeline.tools import json_object, tool_call_of, tool_of
from services.frontend.text.chat_template import Message
from services.telemetry.tracing import checked_traceparent

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
        priority=options.priority,
        cache_salt=options.cache_salt,
        show_special_tokens=options.show_special_tokens,
        num_samples=options.n if options.HasField("n") else 1,
        parse_special_tokens=parse_special_tokens_of(options),
        traceparent=checked_traceparent(options.traceparent),
    )


def parse_special_tokens_of(
    source: frontend_pb2.GenerationOptions | frontend_pb2.TokenizeRequest,
) -> bool | None:
    """Reads whether spellings of special tokens count; None leaves it to the kind of prompt."""
    return source.parse_special_tokens if source.HasField("parse_special_tokens") else None


def prompt_of(request: frontend_pb2.GenerateRequest, *, max_tokens: int) -> Prompt:
    """Reads a prompt. An absent one is empty, which the pipeline refuses.

    Raises:
        InvalidRequestError: it has `max_tokens` token ids or more.
    """
    if request.WhichOneof("prompt") == "tokens":
        check_num_tokens(len(request.tokens.ids), max_tokens)
        return list(request.tokens.ids)
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
    return Conversation([_message_of(message) for message in source.messages], tools)


def _message_of(message: frontend_pb2.ChatMessage) -> Message:
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        read["content"] = message.content or None
        read["tool_calls"] = [
            tool_call_of(call.id, call.name, call.arguments) for call in message.tool_calls
        ]
    if message.HasField("tool_call_id"):
        read["tool_call_id"] = message.tool_call_id
    return read


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
