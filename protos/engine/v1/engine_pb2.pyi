from protos.common.v1 import failure_pb2 as _failure_pb2
from protos.common.v1 import request_story_pb2 as _request_story_pb2
from protos.common.v1 import sampling_pb2 as _sampling_pb2
from protos.engine.v1 import batch_pb2 as _batch_pb2
from protos.engine.v1 import kv_events_pb2 as _kv_events_pb2
from protos.engine.v1 import recording_pb2 as _recording_pb2
from protos.engine.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_SCORE: _ClassVar[PoolingTask]
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBED: PoolingTask
POOLING_TASK_SCORE: PoolingTask

class StartProfileRequest(_message.Message):
    __slots__ = ("max_steps", "duration_ms")
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    max_steps: int
    duration_ms: int
    def __init__(self, max_steps: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("path", "num_bytes", "num_steps", "duration_s", "end")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    path: str
    num_bytes: int
    num_steps: int
    duration_s: float
    end: _worker_pb2.ProfileEnd
    def __init__(self, path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_steps: _Optional[int] = ..., duration_s: _Optional[float] = ..., end: _Optional[_Union[_worker_pb2.ProfileEnd, str]] = ...) -> None: ...

class FrontendMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "credit", "image_part", "drop_images")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PART_FIELD_NUMBER: _ClassVar[int]
    DROP_IMAGES_FIELD_NUMBER: _ClassVar[int]
    hello: FrontendHello
    submit: Submit
    abort: Abort
    credit: Credit
    image_part: ImagePart
    drop_images: DropImages
    def __init__(self, hello: _Optional[_Union[FrontendHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., image_part: _Optional[_Union[ImagePart, _Mapping]] = ..., drop_images: _Optional[_Union[DropImages, _Mapping]] = ...) -> None: ...

class ImagePart(_message.Message):
    __slots__ = ("digest", "patches", "grid")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    patches: bytes
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[bytes] = ..., patches: _Optional[bytes] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class DropImages(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FrontendHello(_message.Message):
    __slots__ = ("frontend_id", "wants_prefixes", "prefix_key_version")
    FRONTEND_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_VERSION_FIELD_NUMBER: _ClassVar[int]
    frontend_id: str
    wants_prefixes: bool
    prefix_key_version: int
    def __init__(self, frontend_id: _Optional[str] = ..., wants_prefixes: _Optional[bool] = ..., prefix_key_version: _Optional[int] = ...) -> None: ...

class ImageProcessor(_message.Message):
    __slots__ = ("kind", "settings", "image_token_id", "max_patches", "max_image_bytes", "template_token_id", "text_around")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_PATCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_AROUND_FIELD_NUMBER: _ClassVar[int]
    kind: str
    settings: str
    image_token_id: int
    max_patches: int
    max_image_bytes: int
    template_token_id: int
    text_around: str
    def __init__(self, kind: _Optional[str] = ..., settings: _Optional[str] = ..., image_token_id: _Optional[int] = ..., max_patches: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., template_token_id: _Optional[int] = ..., text_around: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_token_ids", "sampling", "priority", "timeout_ms", "cache_salt", "caller", "traceparent", "num_resumed_tokens", "images", "pool", "adapter")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_token_ids: bytes
    sampling: _sampling_pb2.SamplingParams
    priority: int
    timeout_ms: int
    cache_salt: str
    caller: str
    traceparent: str
    num_resumed_tokens: int
    images: _containers.RepeatedCompositeFieldContainer[Image]
    pool: bool
    adapter: str
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., caller: _Optional[str] = ..., traceparent: _Optional[str] = ..., num_resumed_tokens: _Optional[int] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., pool: _Optional[bool] = ..., adapter: _Optional[str] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "offset", "num_tokens")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    num_tokens: int
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("steps_read",)
    STEPS_READ_FIELD_NUMBER: _ClassVar[int]
    steps_read: int
    def __init__(self, steps_read: _Optional[int] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("hello", "admitted", "rejected", "step", "heartbeat", "draining")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: EngineHello
    admitted: Admitted
    rejected: Rejected
    step: StepOutput
    heartbeat: Heartbeat
    draining: Draining
    def __init__(self, hello: _Optional[_Union[EngineHello, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class EngineHello(_message.Message):
    __slots__ = ("engine_id", "model", "credit_window", "heartbeat_interval_ms")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model: str
    credit_window: int
    heartbeat_interval_ms: int
    def __init__(self, engine_id: _Optional[str] = ..., model: _Optional[str] = ..., credit_window: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("handle", "weights_version")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    handle: int
    weights_version: str
    def __init__(self, handle: _Optional[int] = ..., weights_version: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "failure")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    failure: _failure_pb2.Failure
    def __init__(self, handle: _Optional[int] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("handles", "num_tokens", "token_ids", "logprobs", "finished", "prompt_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    num_tokens: bytes
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[RequestLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RequestLogprobs]
    def __init__(self, handles: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[RequestLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RequestLogprobs, _Mapping]]] = ...) -> None: ...

class RequestLogprobs(_message.Message):
    __slots__ = ("handle", "positions")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    positions: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    def __init__(self, handle: _Optional[int] = ..., positions: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "finish_reason", "failure", "usage", "stop_token_id", "vector")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    finish_reason: _sampling_pb2.FinishReason
    failure: _failure_pb2.Failure
    usage: _sampling_pb2.Usage
    stop_token_id: int
    vector: bytes
    def __init__(self, handle: _Optional[int] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., failure: _Optional[_Union[_failure_pb2.Failure, _Mapping]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., vector: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step_age_ms", "num_running", "num_waiting", "num_free_blocks", "ready", "prefixes", "num_used_blocks", "adapters", "asleep", "num_recent_tokens", "weights_salt")
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SALT_FIELD_NUMBER: _ClassVar[int]
    step_age_ms: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    ready: bool
    prefixes: PrefixChanges
    num_used_blocks: int
    adapters: KnownAdapters
    asleep: bool
    num_recent_tokens: int
    weights_salt: bytes
    def __init__(self, step_age_ms: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., ready: _Optional[bool] = ..., prefixes: _Optional[_Union[PrefixChanges, _Mapping]] = ..., num_used_blocks: _Optional[int] = ..., adapters: _Optional[_Union[KnownAdapters, _Mapping]] = ..., asleep: _Optional[bool] = ..., num_recent_tokens: _Optional[int] = ..., weights_salt: _Optional[bytes] = ...) -> None: ...

class KnownAdapters(_message.Message):
    __slots__ = ("adapters", "num_changes")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANGES_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[KnownAdapter]
    num_changes: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[KnownAdapter, _Mapping]]] = ..., num_changes: _Optional[int] = ...) -> None: ...

class KnownAdapter(_message.Message):
    __slots__ = ("name", "digest", "is_resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    is_resident: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., is_resident: _Optional[bool] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("reset", "added", "removed")
    RESET_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    added: bytes
    removed: bytes
    def __init__(self, reset: _Optional[bool] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "priority", "model", "cache_salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    priority: int
    model: str
    cache_salt: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "usage", "stop_token_id", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    usage: _sampling_pb2.Usage
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_sampling_pb2.Usage, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "max_model_len", "vocab_size", "eos_token_ids", "default_sampling", "tokenizer_sha256", "engine_id", "block_size", "num_blocks", "device_name", "dtype", "num_parameters", "config_sha256", "prefix_key_version", "image_processor", "pooling", "max_running", "weights_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SHA256_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_VERSION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _sampling_pb2.SamplingParams
    tokenizer_sha256: str
    engine_id: str
    block_size: int
    num_blocks: int
    device_name: str
    dtype: str
    num_parameters: int
    config_sha256: str
    prefix_key_version: int
    image_processor: ImageProcessor
    pooling: Pooling
    max_running: int
    weights_version: str
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., tokenizer_sha256: _Optional[str] = ..., engine_id: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., device_name: _Optional[str] = ..., dtype: _Optional[str] = ..., num_parameters: _Optional[int] = ..., config_sha256: _Optional[str] = ..., prefix_key_version: _Optional[int] = ..., image_processor: _Optional[_Union[ImageProcessor, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., max_running: _Optional[int] = ..., weights_version: _Optional[str] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("task", "size", "is_normalized", "max_input_tokens", "prompts", "default_prompt_name", "pair")
    class PromptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TASK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    MAX_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    task: PoolingTask
    size: int
    is_normalized: bool
    max_input_tokens: int
    prompts: _containers.ScalarMap[str, str]
    default_prompt_name: str
    pair: PairText
    def __init__(self, task: _Optional[_Union[PoolingTask, str]] = ..., size: _Optional[int] = ..., is_normalized: _Optional[bool] = ..., max_input_tokens: _Optional[int] = ..., prompts: _Optional[_Mapping[str, str]] = ..., default_prompt_name: _Optional[str] = ..., pair: _Optional[_Union[PairText, _Mapping]] = ...) -> None: ...

class PairText(_message.Message):
    __slots__ = ("prefix", "text", "suffix", "instruction")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    text: str
    suffix: str
    instruction: str
    def __init__(self, prefix: _Optional[str] = ..., text: _Optional[str] = ..., suffix: _Optional[str] = ..., instruction: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("file_name", "content")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    content: bytes
    def __init__(self, file_name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("include_step_sizes", "include_experts")
    INCLUDE_STEP_SIZES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    include_step_sizes: bool
    include_experts: bool
    def __init__(self, include_step_sizes: _Optional[bool] = ..., include_experts: _Optional[bool] = ...) -> None: ...

class ExpertStats(_message.Message):
    __slots__ = ("expert_load", "physical_to_logical", "rank_load")
    EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_TO_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    RANK_LOAD_FIELD_NUMBER: _ClassVar[int]
    expert_load: _containers.RepeatedScalarFieldContainer[int]
    physical_to_logical: _containers.RepeatedScalarFieldContainer[int]
    rank_load: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, expert_load: _Optional[_Iterable[int]] = ..., physical_to_logical: _Optional[_Iterable[int]] = ..., rank_load: _Optional[_Iterable[float]] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("uptime_s", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_state_blocks", "num_snapshots", "num_snapshots_made", "num_snapshots_used", "num_recomputed_tokens", "state_bytes", "num_host_blocks", "num_host_stores", "num_host_loads", "host_copy_bytes", "host_copy_s", "host_hit_tokens", "num_disk_blocks", "num_disk_writes", "num_disk_reads", "disk_read_s", "disk_hit_tokens", "num_disk_faults", "num_disk_drops", "num_encoded_images", "num_found_images", "images_by_run", "num_steps", "prompt_tokens", "cached_tokens", "output_tokens", "finished", "rejected", "num_preemptions", "num_worker_restarts", "worker_busy_us", "schedule_us", "graph_dispatch", "num_sessions", "ready", "num_tasks", "cudagraph_mode", "cudagraph_mode_reason", "num_graphs_planned", "graphs", "decode_coverage", "other_coverage", "decode_steps", "other_steps", "num_late_builds", "num_failed_steps", "num_batched_tokens_limit", "pass_matches", "weights", "num_speculative_tokens", "draft_tokens", "accepted_draft_tokens", "num_verifications", "accepted_per_position", "steps_by_num_drafts", "time_to_first_token_s", "inter_token_latency_s", "e2e_request_latency_s", "request_queue_time_s", "ranks", "experts", "num_expert_moves", "rank_loads", "worker_progress", "sleep_state", "sleep_level", "weights_version", "adapters")
    class ImagesByRunEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GraphDispatchEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DecodeStepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class OtherStepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class PassMatchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StepsByNumDraftsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_MADE_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_STORES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_LOADS_FIELD_NUMBER: _ClassVar[int]
    HOST_COPY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_COPY_S_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_WRITES_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_READS_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_S_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_DROPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_BY_RUN_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_BUSY_US_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_US_FIELD_NUMBER: _ClassVar[int]
    GRAPH_DISPATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_GRAPHS_PLANNED_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    DECODE_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    OTHER_COVERAGE_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    OTHER_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_BUILDS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHED_TOKENS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PASS_MATCHES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    E2E_REQUEST_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_MOVES_FIELD_NUMBER: _ClassVar[int]
    RANK_LOADS_FIELD_NUMBER: _ClassVar[int]
    WORKER_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SLEEP_STATE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_state_blocks: int
    num_snapshots: int
    num_snapshots_made: int
    num_snapshots_used: int
    num_recomputed_tokens: int
    state_bytes: int
    num_host_blocks: int
    num_host_stores: int
    num_host_loads: int
    host_copy_bytes: int
    host_copy_s: float
    host_hit_tokens: int
    num_disk_blocks: int
    num_disk_writes: int
    num_disk_reads: int
    disk_read_s: float
    disk_hit_tokens: int
    num_disk_faults: int
    num_disk_drops: int
    num_encoded_images: int
    num_found_images: int
    images_by_run: _containers.ScalarMap[str, int]
    num_steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finished: _containers.ScalarMap[str, int]
    rejected: _containers.ScalarMap[str, int]
    num_preemptions: int
    num_worker_restarts: int
    worker_busy_us: int
    schedule_us: int
    graph_dispatch: _containers.ScalarMap[str, int]
    num_sessions: int
    ready: bool
    num_tasks: int
    cudagraph_mode: str
    cudagraph_mode_reason: str
    num_graphs_planned: int
    graphs: _containers.RepeatedCompositeFieldContainer[GraphStats]
    decode_coverage: GraphCoverage
    other_coverage: GraphCoverage
    decode_steps: _containers.ScalarMap[int, int]
    other_steps: _containers.ScalarMap[int, int]
    num_late_builds: int
    num_failed_steps: int
    num_batched_tokens_limit: int
    pass_matches: _containers.ScalarMap[str, int]
    weights: _containers.RepeatedCompositeFieldContainer[_worker_pb2.KeptWeights]
    num_speculative_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    num_verifications: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    steps_by_num_drafts: _containers.ScalarMap[int, int]
    time_to_first_token_s: Histogram
    inter_token_latency_s: Histogram
    e2e_request_latency_s: Histogram
    request_queue_time_s: Histogram
    ranks: _containers.RepeatedCompositeFieldContainer[_worker_pb2.RankInfo]
    experts: _containers.RepeatedCompositeFieldContainer[ExpertStats]
    num_expert_moves: int
    rank_loads: _containers.RepeatedCompositeFieldContainer[RankLoad]
    worker_progress: str
    sleep_state: str
    sleep_level: int
    weights_version: str
    adapters: AdapterStats
    def __init__(self, uptime_s: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_state_blocks: _Optional[int] = ..., num_snapshots: _Optional[int] = ..., num_snapshots_made: _Optional[int] = ..., num_snapshots_used: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., state_bytes: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_host_stores: _Optional[int] = ..., num_host_loads: _Optional[int] = ..., host_copy_bytes: _Optional[int] = ..., host_copy_s: _Optional[float] = ..., host_hit_tokens: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., num_disk_writes: _Optional[int] = ..., num_disk_reads: _Optional[int] = ..., disk_read_s: _Optional[float] = ..., disk_hit_tokens: _Optional[int] = ..., num_disk_faults: _Optional[int] = ..., num_disk_drops: _Optional[int] = ..., num_encoded_images: _Optional[int] = ..., num_found_images: _Optional[int] = ..., images_by_run: _Optional[_Mapping[str, int]] = ..., num_steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., finished: _Optional[_Mapping[str, int]] = ..., rejected: _Optional[_Mapping[str, int]] = ..., num_preemptions: _Optional[int] = ..., num_worker_restarts: _Optional[int] = ..., worker_busy_us: _Optional[int] = ..., schedule_us: _Optional[int] = ..., graph_dispatch: _Optional[_Mapping[str, int]] = ..., num_sessions: _Optional[int] = ..., ready: _Optional[bool] = ..., num_tasks: _Optional[int] = ..., cudagraph_mode: _Optional[str] = ..., cudagraph_mode_reason: _Optional[str] = ..., num_graphs_planned: _Optional[int] = ..., graphs: _Optional[_Iterable[_Union[GraphStats, _Mapping]]] = ..., decode_coverage: _Optional[_Union[GraphCoverage, _Mapping]] = ..., other_coverage: _Optional[_Union[GraphCoverage, _Mapping]] = ..., decode_steps: _Optional[_Mapping[int, int]] = ..., other_steps: _Optional[_Mapping[int, int]] = ..., num_late_builds: _Optional[int] = ..., num_failed_steps: _Optional[int] = ..., num_batched_tokens_limit: _Optional[int] = ..., pass_matches: _Optional[_Mapping[str, int]] = ..., weights: _Optional[_Iterable[_Union[_worker_pb2.KeptWeights, _Mapping]]] = ..., num_speculative_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., num_verifications: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., steps_by_num_drafts: _Optional[_Mapping[int, int]] = ..., time_to_first_token_s: _Optional[_Union[Histogram, _Mapping]] = ..., inter_token_latency_s: _Optional[_Union[Histogram, _Mapping]] = ..., e2e_request_latency_s: _Optional[_Union[Histogram, _Mapping]] = ..., request_queue_time_s: _Optional[_Union[Histogram, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[_worker_pb2.RankInfo, _Mapping]]] = ..., experts: _Optional[_Iterable[_Union[ExpertStats, _Mapping]]] = ..., num_expert_moves: _Optional[int] = ..., rank_loads: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., worker_progress: _Optional[str] = ..., sleep_state: _Optional[str] = ..., sleep_level: _Optional[int] = ..., weights_version: _Optional[str] = ..., adapters: _Optional[_Union[AdapterStats, _Mapping]] = ...) -> None: ...

class AdapterStats(_message.Message):
    __slots__ = ("num_slots", "num_known", "num_resident", "num_read", "read_s", "num_slot_loads", "num_evictions", "num_waiting_for_slot", "num_running", "num_waiting")
    class NumRunningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumWaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOT_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    num_known: int
    num_resident: int
    num_read: int
    read_s: float
    num_slot_loads: int
    num_evictions: int
    num_waiting_for_slot: int
    num_running: _containers.ScalarMap[str, int]
    num_waiting: _containers.ScalarMap[str, int]
    def __init__(self, num_slots: _Optional[int] = ..., num_known: _Optional[int] = ..., num_resident: _Optional[int] = ..., num_read: _Optional[int] = ..., read_s: _Optional[float] = ..., num_slot_loads: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_waiting_for_slot: _Optional[int] = ..., num_running: _Optional[_Mapping[str, int]] = ..., num_waiting: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class GraphCoverage(_message.Message):
    __slots__ = ("sizes", "limit", "max_padding")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_PADDING_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    max_padding: int
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., max_padding: _Optional[int] = ...) -> None: ...

class GraphStats(_message.Message):
    __slots__ = ("num_tokens", "graph_bs", "max_q_len", "captured", "capture_s", "num_bytes", "num_replays", "padded_tokens", "fault", "kind", "shares_prefixes", "skips_adapters")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BS_FIELD_NUMBER: _ClassVar[int]
    MAX_Q_LEN_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHARES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SKIPS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    graph_bs: int
    max_q_len: int
    captured: bool
    capture_s: float
    num_bytes: int
    num_replays: int
    padded_tokens: int
    fault: str
    kind: _batch_pb2.GraphKind
    shares_prefixes: bool
    skips_adapters: bool
    def __init__(self, num_tokens: _Optional[int] = ..., graph_bs: _Optional[int] = ..., max_q_len: _Optional[int] = ..., captured: _Optional[bool] = ..., capture_s: _Optional[float] = ..., num_bytes: _Optional[int] = ..., num_replays: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., fault: _Optional[str] = ..., kind: _Optional[_Union[_batch_pb2.GraphKind, str]] = ..., shares_prefixes: _Optional[bool] = ..., skips_adapters: _Optional[bool] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("include_token_ids", "include_snapshot")
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    include_token_ids: bool
    include_snapshot: bool
    def __init__(self, include_token_ids: _Optional[bool] = ..., include_snapshot: _Optional[bool] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("descriptor", "result", "num_missed", "snapshot", "image")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    descriptor: _batch_pb2.BatchDescriptor
    result: _batch_pb2.StepResult
    num_missed: int
    snapshot: _recording_pb2.Snapshot
    image: _recording_pb2.RecordedImage
    def __init__(self, descriptor: _Optional[_Union[_batch_pb2.BatchDescriptor, _Mapping]] = ..., result: _Optional[_Union[_batch_pb2.StepResult, _Mapping]] = ..., num_missed: _Optional[int] = ..., snapshot: _Optional[_Union[_recording_pb2.Snapshot, _Mapping]] = ..., image: _Optional[_Union[_recording_pb2.RecordedImage, _Mapping]] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("story",)
    STORY_FIELD_NUMBER: _ClassVar[int]
    story: _request_story_pb2.RequestStory
    def __init__(self, story: _Optional[_Union[_request_story_pb2.RequestStory, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_finished", "num_aborted")
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_finished: int
    num_aborted: int
    def __init__(self, num_finished: _Optional[int] = ..., num_aborted: _Optional[int] = ...) -> None: ...
