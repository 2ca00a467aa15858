from protos.engine.v1 import batch_pb2 as _batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordingHeader(_message.Message):
    __slots__ = ("format", "version")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    format: str
    version: int
    def __init__(self, format: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("engine", "next_step_id", "rows", "adapters")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    engine: EngineSettings
    next_step_id: int
    rows: _containers.RepeatedCompositeFieldContainer[RowSnapshot]
    adapters: _containers.RepeatedCompositeFieldContainer[_batch_pb2.AdapterLoad]
    def __init__(self, engine: _Optional[_Union[EngineSettings, _Mapping]] = ..., next_step_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RowSnapshot, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[_batch_pb2.AdapterLoad, _Mapping]]] = ...) -> None: ...

class RecordedImage(_message.Message):
    __slots__ = ("digest", "patches")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    patches: bytes
    def __init__(self, digest: _Optional[bytes] = ..., patches: _Optional[bytes] = ...) -> None: ...

class RowSnapshot(_message.Message):
    __slots__ = ("assignment", "block_ids", "num_computed_tokens", "state_block_ids")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    assignment: _batch_pb2.RowAssignment
    block_ids: bytes
    num_computed_tokens: int
    state_block_ids: bytes
    def __init__(self, assignment: _Optional[_Union[_batch_pb2.RowAssignment, _Mapping]] = ..., block_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., state_block_ids: _Optional[bytes] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("model", "architecture", "config_sha256", "load_format", "quantization", "device_name", "dtype", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks", "compilation_level", "use_inductor", "cudagraph_mode", "num_speculative_tokens", "speculative_method", "kv_cache_dtype", "batch_invariant", "task", "max_loras", "max_lora_rank", "lora_embeddings", "lora_experts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SHA256_FIELD_NUMBER: _ClassVar[int]
    LOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPILATION_LEVEL_FIELD_NUMBER: _ClassVar[int]
    USE_INDUCTOR_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    LORA_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    LORA_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    config_sha256: str
    load_format: str
    quantization: str
    device_name: str
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    compilation_level: int
    use_inductor: bool
    cudagraph_mode: str
    num_speculative_tokens: int
    speculative_method: str
    kv_cache_dtype: str
    batch_invariant: bool
    task: str
    max_loras: int
    max_lora_rank: int
    lora_embeddings: bool
    lora_experts: bool
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., config_sha256: _Optional[str] = ..., load_format: _Optional[str] = ..., quantization: _Optional[str] = ..., device_name: _Optional[str] = ..., dtype: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., compilation_level: _Optional[int] = ..., use_inductor: _Optional[bool] = ..., cudagraph_mode: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., speculative_method: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., task: _Optional[str] = ..., max_loras: _Optional[int] = ..., max_lora_rank: _Optional[int] = ..., lora_embeddings: _Optional[bool] = ..., lora_experts: _Optional[bool] = ...) -> None: ...
