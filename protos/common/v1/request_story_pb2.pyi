from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STAGE_UNSPECIFIED: _ClassVar[RequestStage]
    REQUEST_STAGE_PREPARED: _ClassVar[RequestStage]
    REQUEST_STAGE_QUEUED: _ClassVar[RequestStage]
    REQUEST_STAGE_FULL_STEP: _ClassVar[RequestStage]
    REQUEST_STAGE_FULL_ROWS: _ClassVar[RequestStage]
    REQUEST_STAGE_FULL_CACHE: _ClassVar[RequestStage]
    REQUEST_STAGE_SAME_PREFIX: _ClassVar[RequestStage]
    REQUEST_STAGE_GRAMMAR: _ClassVar[RequestStage]
    REQUEST_STAGE_IMAGE: _ClassVar[RequestStage]
    REQUEST_STAGE_LOADING: _ClassVar[RequestStage]
    REQUEST_STAGE_ADAPTER: _ClassVar[RequestStage]
    REQUEST_STAGE_ALONE: _ClassVar[RequestStage]
    REQUEST_STAGE_NO_WORKER: _ClassVar[RequestStage]
    REQUEST_STAGE_PREFILL: _ClassVar[RequestStage]
    REQUEST_STAGE_DECODE: _ClassVar[RequestStage]
REQUEST_STAGE_UNSPECIFIED: RequestStage
REQUEST_STAGE_PREPARED: RequestStage
REQUEST_STAGE_QUEUED: RequestStage
REQUEST_STAGE_FULL_STEP: RequestStage
REQUEST_STAGE_FULL_ROWS: RequestStage
REQUEST_STAGE_FULL_CACHE: RequestStage
REQUEST_STAGE_SAME_PREFIX: RequestStage
REQUEST_STAGE_GRAMMAR: RequestStage
REQUEST_STAGE_IMAGE: RequestStage
REQUEST_STAGE_LOADING: RequestStage
REQUEST_STAGE_ADAPTER: RequestStage
REQUEST_STAGE_ALONE: RequestStage
REQUEST_STAGE_NO_WORKER: RequestStage
REQUEST_STAGE_PREFILL: RequestStage
REQUEST_STAGE_DECODE: RequestStage

class RequestStory(_message.Message):
    __slots__ = ("request_id", "engine_id", "duration_s", "end", "stages", "stage", "prompt_tokens", "cached_tokens", "output_tokens", "resumed_tokens", "time_to_first_token_s", "num_prefill_steps", "num_decode_steps", "num_preemptions", "num_losses", "num_recomputed_tokens", "longest_gap")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    duration_s: float
    end: str
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    stage: RequestStage
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    resumed_tokens: int
    time_to_first_token_s: float
    num_prefill_steps: int
    num_decode_steps: int
    num_preemptions: int
    num_losses: int
    num_recomputed_tokens: int
    longest_gap: LongestGap
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., duration_s: _Optional[float] = ..., end: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., stage: _Optional[_Union[RequestStage, str]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., resumed_tokens: _Optional[int] = ..., time_to_first_token_s: _Optional[float] = ..., num_prefill_steps: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_losses: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., longest_gap: _Optional[_Union[LongestGap, _Mapping]] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: RequestStage
    seconds: float
    def __init__(self, stage: _Optional[_Union[RequestStage, str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class LongestGap(_message.Message):
    __slots__ = ("seconds", "step_id", "num_tokens", "batch_size")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    step_id: int
    num_tokens: int
    batch_size: int
    def __init__(self, seconds: _Optional[float] = ..., step_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...
