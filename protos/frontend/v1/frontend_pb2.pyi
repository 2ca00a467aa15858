from protos.common.v1 import failure_pb2 as _failure_pb2
from protos.common.v1 import request_story_pb2 as _request_story_pb2
from protos.common.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_USE_UNSPECIFIED: _ClassVar[ToolUse]
    TOOL_USE_NONE: _ClassVar[ToolUse]
    TOOL_USE_REQUIRED: _ClassVar[ToolUse]

class PromptEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROMPT_END_UNSPECIFIED: _ClassVar[PromptEnd]
    PROMPT_END_MESSAGES: _ClassVar[PromptEnd]
    PROMPT_END_LAST_MESSAGE: _ClassVar[PromptEnd]
TOOL_USE_UNSPECIFIED: ToolUse
TOOL_USE_NONE: ToolUse
TOOL_USE_REQUIRED: ToolUse
PROMPT_END_UNSPECIFIED: PromptEnd
PROMPT_END_MESSAGES: PromptEnd
PROMPT_END_LAST_MESSAGE: PromptEnd

class GenerationOptions(_message.Message):
    __slots__ = ("model", "request_id", "sampling", "stop", "priority", "cache_salt", "show_special_tokens", "traceparent", "n", "parse_special_tokens", "show_stop", "truncate_prompt_tokens", "bad_words")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHOW_STOP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    request_id: str
    sampling: _sampling_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    cache_salt: str
    show_special_tokens: bool
    traceparent: str
    n: int
    parse_special_tokens: bool
    show_stop: bool
    truncate_prompt_tokens: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[str] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., show_special_tokens: _Optional[bool] = ..., traceparent: _Optional[str] = ..., n: _Optional[int] = ..., parse_special_tokens: _Optional[bool] = ..., show_stop: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class VectorOptions(_message.Message):
    __slots__ = ("model", "request_id", "priority", "cache_salt", "truncate_tokens", "traceparent")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    model: str
    request_id: str
    priority: int
    cache_salt: str
    truncate_tokens: int
    traceparent: str
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., truncate_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("options", "inputs", "dimensions", "prompt_name")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    options: VectorOptions
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    dimensions: int
    prompt_name: str
    def __init__(self, options: _Optional[_Union[VectorOptions, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., dimensions: _Optional[int] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: TokenIds
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("vectors", "size", "usage")
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    vectors: bytes
    size: int
    usage: _sampling_pb2.Usage
    def __init__(self, vectors: _Optional[bytes] = ..., size: _Optional[int] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("options", "queries", "documents", "instruction")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    options: VectorOptions
    queries: _containers.RepeatedScalarFieldContainer[str]
    documents: _containers.RepeatedScalarFieldContainer[str]
    instruction: str
    def __init__(self, options: _Optional[_Union[VectorOptions, _Mapping]] = ..., queries: _Optional[_Iterable[str]] = ..., documents: _Optional[_Iterable[str]] = ..., instruction: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "usage")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    usage: _sampling_pb2.Usage
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("options", "text", "tokens")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    options: GenerationOptions
    text: str
    tokens: TokenIds
    def __init__(self, options: _Optional[_Union[GenerationOptions, _Mapping]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: Output
    def __init__(self, output: _Optional[_Union[Output, _Mapping]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "logprobs", "finish_reason", "stop_string", "stop_token_id", "usage", "index", "prompt_logprobs", "reasoning", "tool_calls")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    usage: _sampling_pb2.Usage
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallPiece]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallPiece, _Mapping]]] = ...) -> None: ...

class ToolCallPiece(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "reasoning", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image", "image_url")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URL_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: bytes
    image_url: str
    def __init__(self, text: _Optional[str] = ..., image: _Optional[bytes] = ..., image_url: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("options", "messages", "tools", "tool_use", "required_tool", "parallel_tool_calls", "template_variables", "max_reasoning_tokens", "prompt_end")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_USE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_TOOL_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_END_FIELD_NUMBER: _ClassVar[int]
    options: GenerationOptions
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_use: ToolUse
    required_tool: str
    parallel_tool_calls: bool
    template_variables: str
    max_reasoning_tokens: int
    prompt_end: PromptEnd
    def __init__(self, options: _Optional[_Union[GenerationOptions, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_use: _Optional[_Union[ToolUse, str]] = ..., required_tool: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ..., template_variables: _Optional[str] = ..., max_reasoning_tokens: _Optional[int] = ..., prompt_end: _Optional[_Union[PromptEnd, str]] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: Output
    def __init__(self, output: _Optional[_Union[Output, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("handle", "generate", "chat", "prompt_part", "cancel")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PART_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    generate: GenerateRequest
    chat: ChatRequest
    prompt_part: PromptPart
    cancel: Cancel
    def __init__(self, handle: _Optional[int] = ..., generate: _Optional[_Union[GenerateRequest, _Mapping]] = ..., chat: _Optional[_Union[ChatRequest, _Mapping]] = ..., prompt_part: _Optional[_Union[PromptPart, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("options", "text", "last")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    options: GenerationOptions
    text: str
    last: bool
    def __init__(self, options: _Optional[_Union[GenerationOptions, _Mapping]] = ..., text: _Optional[str] = ..., last: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("handle", "output", "failure")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    output: Output
    failure: _failure_pb2.Failure
    def __init__(self, handle: _Optional[int] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "conversation", "parse_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    conversation: Conversation
    parse_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., parse_special_tokens: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "tools", "template_variables", "prompt_end")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_END_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    template_variables: str
    prompt_end: PromptEnd
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., template_variables: _Optional[str] = ..., prompt_end: _Optional[_Union[PromptEnd, str]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "show_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    show_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., show_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCard]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCard, _Mapping]]] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "max_model_len", "default_sampling", "ready", "architecture", "chat_template_error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    default_sampling: _sampling_pb2.SamplingParams
    ready: bool
    architecture: str
    chat_template_error: str
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., default_sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., ready: _Optional[bool] = ..., architecture: _Optional[str] = ..., chat_template_error: _Optional[str] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "num_retries", "num_migrations")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineCard]
    num_retries: int
    num_migrations: int
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineCard, _Mapping]]] = ..., num_retries: _Optional[int] = ..., num_migrations: _Optional[int] = ...) -> None: ...

class EngineCard(_message.Message):
    __slots__ = ("address", "ready", "reason", "engine_id", "num_live", "num_running", "num_waiting", "num_known_prefixes")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    address: str
    ready: bool
    reason: str
    engine_id: str
    num_live: int
    num_running: int
    num_waiting: int
    num_known_prefixes: int
    def __init__(self, address: _Optional[str] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ..., engine_id: _Optional[str] = ..., num_live: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_known_prefixes: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("frontend", "engines")
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    frontend: FrontendStory
    engines: _containers.RepeatedCompositeFieldContainer[EngineStory]
    def __init__(self, frontend: _Optional[_Union[FrontendStory, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineStory, _Mapping]]] = ...) -> None: ...

class FrontendStory(_message.Message):
    __slots__ = ("method", "duration_s", "end", "tokenize_s", "submit_s", "first_output_s", "stream_s", "unread_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_S_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_S_FIELD_NUMBER: _ClassVar[int]
    STREAM_S_FIELD_NUMBER: _ClassVar[int]
    UNREAD_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    duration_s: float
    end: str
    tokenize_s: float
    submit_s: float
    first_output_s: float
    stream_s: float
    unread_s: float
    def __init__(self, method: _Optional[str] = ..., duration_s: _Optional[float] = ..., end: _Optional[str] = ..., tokenize_s: _Optional[float] = ..., submit_s: _Optional[float] = ..., first_output_s: _Optional[float] = ..., stream_s: _Optional[float] = ..., unread_s: _Optional[float] = ...) -> None: ...

class EngineStory(_message.Message):
    __slots__ = ("address", "left_because", "story", "missing")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEFT_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    address: str
    left_because: str
    story: _request_story_pb2.RequestStory
    missing: str
    def __init__(self, address: _Optional[str] = ..., left_because: _Optional[str] = ..., story: _Optional[_Union[_request_story_pb2.RequestStory, _Mapping]] = ..., missing: _Optional[str] = ...) -> None: ...
