from protos.engine.v1 import batch_pb2 as _batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProfileEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_END_UNSPECIFIED: _ClassVar[ProfileEnd]
    PROFILE_END_STOPPED: _ClassVar[ProfileEnd]
    PROFILE_END_STEPS: _ClassVar[ProfileEnd]
    PROFILE_END_TIME: _ClassVar[ProfileEnd]
    PROFILE_END_MEMORY: _ClassVar[ProfileEnd]

class GraphState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAPH_STATE_UNSPECIFIED: _ClassVar[GraphState]
    GRAPH_STATE_CAPTURED: _ClassVar[GraphState]
    GRAPH_STATE_QUARANTINED: _ClassVar[GraphState]
    GRAPH_STATE_PROVISIONAL: _ClassVar[GraphState]
PROFILE_END_UNSPECIFIED: ProfileEnd
PROFILE_END_STOPPED: ProfileEnd
PROFILE_END_STEPS: ProfileEnd
PROFILE_END_TIME: ProfileEnd
PROFILE_END_MEMORY: ProfileEnd
GRAPH_STATE_UNSPECIFIED: GraphState
GRAPH_STATE_CAPTURED: GraphState
GRAPH_STATE_QUARANTINED: GraphState
GRAPH_STATE_PROVISIONAL: GraphState

class WorkerCommand(_message.Message):
    __slots__ = ("step", "start_profile", "stop_profile", "capture", "place_experts", "read_expert_load", "read_adapter", "forget_adapter", "sleep", "wake", "check_weights", "swap_weights", "drop_weights", "order_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_PROFILE_FIELD_NUMBER: _ClassVar[int]
    STOP_PROFILE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    PLACE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    READ_EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    READ_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FORGET_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    CHECK_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SWAP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    step: bytes
    start_profile: ProfileStart
    stop_profile: ProfileStop
    capture: GraphOrder
    place_experts: ExpertPlacement
    read_expert_load: ExpertLoadOrder
    read_adapter: ReadAdapter
    forget_adapter: ForgetAdapter
    sleep: SleepOrder
    wake: WakeOrder
    check_weights: CheckWeights
    swap_weights: SwapWeights
    drop_weights: DropWeights
    order_id: int
    def __init__(self, step: _Optional[bytes] = ..., start_profile: _Optional[_Union[ProfileStart, _Mapping]] = ..., stop_profile: _Optional[_Union[ProfileStop, _Mapping]] = ..., capture: _Optional[_Union[GraphOrder, _Mapping]] = ..., place_experts: _Optional[_Union[ExpertPlacement, _Mapping]] = ..., read_expert_load: _Optional[_Union[ExpertLoadOrder, _Mapping]] = ..., read_adapter: _Optional[_Union[ReadAdapter, _Mapping]] = ..., forget_adapter: _Optional[_Union[ForgetAdapter, _Mapping]] = ..., sleep: _Optional[_Union[SleepOrder, _Mapping]] = ..., wake: _Optional[_Union[WakeOrder, _Mapping]] = ..., check_weights: _Optional[_Union[CheckWeights, _Mapping]] = ..., swap_weights: _Optional[_Union[SwapWeights, _Mapping]] = ..., drop_weights: _Optional[_Union[DropWeights, _Mapping]] = ..., order_id: _Optional[int] = ...) -> None: ...

class ExpertPlacement(_message.Message):
    __slots__ = ("layer", "physical_to_logical")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_TO_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    layer: int
    physical_to_logical: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., physical_to_logical: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadAdapter(_message.Message):
    __slots__ = ("order_id", "path")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    path: str
    def __init__(self, order_id: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class ForgetAdapter(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class AdapterRead(_message.Message):
    __slots__ = ("order_id", "error", "digest", "rank", "num_bytes")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    error: str
    digest: bytes
    rank: int
    num_bytes: int
    def __init__(self, order_id: _Optional[int] = ..., error: _Optional[str] = ..., digest: _Optional[bytes] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ExpertLoadOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GraphOrder(_message.Message):
    __slots__ = ("key", "is_idle", "is_compiled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    IS_IDLE_FIELD_NUMBER: _ClassVar[int]
    IS_COMPILED_FIELD_NUMBER: _ClassVar[int]
    key: _batch_pb2.GraphKey
    is_idle: bool
    is_compiled: bool
    def __init__(self, key: _Optional[_Union[_batch_pb2.GraphKey, _Mapping]] = ..., is_idle: _Optional[bool] = ..., is_compiled: _Optional[bool] = ...) -> None: ...

class ProfileStart(_message.Message):
    __slots__ = ("path", "max_steps", "max_s", "max_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    max_steps: int
    max_s: float
    max_bytes: int
    def __init__(self, path: _Optional[str] = ..., max_steps: _Optional[int] = ..., max_s: _Optional[float] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class ProfileStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileStarted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileReport(_message.Message):
    __slots__ = ("error", "num_bytes", "num_steps", "duration_s", "end")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    error: str
    num_bytes: int
    num_steps: int
    duration_s: float
    end: ProfileEnd
    def __init__(self, error: _Optional[str] = ..., num_bytes: _Optional[int] = ..., num_steps: _Optional[int] = ..., duration_s: _Optional[float] = ..., end: _Optional[_Union[ProfileEnd, str]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("progress", "ready", "result", "failure", "graph", "recompilation", "profile_started", "profile_ended", "compiled", "capture_due", "expert_load", "adapter_read", "disk", "order_answer")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    RECOMPILATION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_STARTED_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ENDED_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_DUE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_READ_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    ORDER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    progress: WorkerProgress
    ready: WorkerReady
    result: _batch_pb2.StepResult
    failure: WorkerFailure
    graph: GraphReport
    recompilation: Recompilation
    profile_started: ProfileStarted
    profile_ended: ProfileReport
    compiled: CompileReport
    capture_due: GraphOrder
    expert_load: ExpertLoad
    adapter_read: AdapterRead
    disk: DiskReport
    order_answer: OrderAnswer
    def __init__(self, progress: _Optional[_Union[WorkerProgress, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., result: _Optional[_Union[_batch_pb2.StepResult, _Mapping]] = ..., failure: _Optional[_Union[WorkerFailure, _Mapping]] = ..., graph: _Optional[_Union[GraphReport, _Mapping]] = ..., recompilation: _Optional[_Union[Recompilation, _Mapping]] = ..., profile_started: _Optional[_Union[ProfileStarted, _Mapping]] = ..., profile_ended: _Optional[_Union[ProfileReport, _Mapping]] = ..., compiled: _Optional[_Union[CompileReport, _Mapping]] = ..., capture_due: _Optional[_Union[GraphOrder, _Mapping]] = ..., expert_load: _Optional[_Union[ExpertLoad, _Mapping]] = ..., adapter_read: _Optional[_Union[AdapterRead, _Mapping]] = ..., disk: _Optional[_Union[DiskReport, _Mapping]] = ..., order_answer: _Optional[_Union[OrderAnswer, _Mapping]] = ...) -> None: ...

class CheckWeights(_message.Message):
    __slots__ = ("path", "is_part")
    PATH_FIELD_NUMBER: _ClassVar[int]
    IS_PART_FIELD_NUMBER: _ClassVar[int]
    path: str
    is_part: bool
    def __init__(self, path: _Optional[str] = ..., is_part: _Optional[bool] = ...) -> None: ...

class SwapWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropWeights(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OrderAnswer(_message.Message):
    __slots__ = ("order_id", "error", "num_bytes", "digest")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    order_id: int
    error: str
    num_bytes: int
    digest: str
    def __init__(self, order_id: _Optional[int] = ..., error: _Optional[str] = ..., num_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class SleepOrder(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: int
    def __init__(self, level: _Optional[int] = ...) -> None: ...

class WakeOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiskReport(_message.Message):
    __slots__ = ("added", "removed", "arrived", "failed", "read_us", "num_faults", "num_drops")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    READ_US_FIELD_NUMBER: _ClassVar[int]
    NUM_FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPS_FIELD_NUMBER: _ClassVar[int]
    added: bytes
    removed: bytes
    arrived: bytes
    failed: bytes
    read_us: int
    num_faults: int
    num_drops: int
    def __init__(self, added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., arrived: _Optional[bytes] = ..., failed: _Optional[bytes] = ..., read_us: _Optional[int] = ..., num_faults: _Optional[int] = ..., num_drops: _Optional[int] = ...) -> None: ...

class ExpertLoad(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ExpertLayout(_message.Message):
    __slots__ = ("num_layers", "num_experts", "num_ranks", "physical_to_logical")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_TO_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_experts: int
    num_ranks: int
    physical_to_logical: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., num_ranks: _Optional[int] = ..., physical_to_logical: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

class KeptWeights(_message.Message):
    __slots__ = ("stored", "kept", "count", "bytes", "rounds_activations")
    STORED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    stored: str
    kept: str
    count: int
    bytes: int
    rounds_activations: bool
    def __init__(self, stored: _Optional[str] = ..., kept: _Optional[str] = ..., count: _Optional[int] = ..., bytes: _Optional[int] = ..., rounds_activations: _Optional[bool] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("num_blocks", "block_bytes", "state_pages", "shared_prefix_tokens", "num_host_slots", "max_step_loads", "block_load_s", "has_disk", "disk_entries", "num_parameters", "load_s", "device_name", "dtype", "graphs", "planned_graphs", "cudagraph_mode", "no_graphs_reason", "cudagraph_mode_reason", "compiled", "ranks", "weights", "experts")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_LOADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    HAS_DISK_FIELD_NUMBER: _ClassVar[int]
    DISK_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_GRAPHS_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    NO_GRAPHS_REASON_FIELD_NUMBER: _ClassVar[int]
    CUDAGRAPH_MODE_REASON_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_bytes: int
    state_pages: int
    shared_prefix_tokens: int
    num_host_slots: int
    max_step_loads: int
    block_load_s: float
    has_disk: bool
    disk_entries: bytes
    num_parameters: int
    load_s: float
    device_name: str
    dtype: str
    graphs: _containers.RepeatedCompositeFieldContainer[GraphReport]
    planned_graphs: _containers.RepeatedCompositeFieldContainer[_batch_pb2.GraphKey]
    cudagraph_mode: str
    no_graphs_reason: _batch_pb2.FallbackReason
    cudagraph_mode_reason: str
    compiled: CompileReport
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    weights: _containers.RepeatedCompositeFieldContainer[KeptWeights]
    experts: ExpertLayout
    def __init__(self, num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., state_pages: _Optional[int] = ..., shared_prefix_tokens: _Optional[int] = ..., num_host_slots: _Optional[int] = ..., max_step_loads: _Optional[int] = ..., block_load_s: _Optional[float] = ..., has_disk: _Optional[bool] = ..., disk_entries: _Optional[bytes] = ..., num_parameters: _Optional[int] = ..., load_s: _Optional[float] = ..., device_name: _Optional[str] = ..., dtype: _Optional[str] = ..., graphs: _Optional[_Iterable[_Union[GraphReport, _Mapping]]] = ..., planned_graphs: _Optional[_Iterable[_Union[_batch_pb2.GraphKey, _Mapping]]] = ..., cudagraph_mode: _Optional[str] = ..., no_graphs_reason: _Optional[_Union[_batch_pb2.FallbackReason, str]] = ..., cudagraph_mode_reason: _Optional[str] = ..., compiled: _Optional[_Union[CompileReport, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[KeptWeights, _Mapping]]] = ..., experts: _Optional[_Union[ExpertLayout, _Mapping]] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("rank", "tensor_parallel_rank", "pid", "device", "num_parameters", "num_blocks", "pipeline_parallel_rank", "data_parallel_rank")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tensor_parallel_rank: int
    pid: int
    device: str
    num_parameters: int
    num_blocks: int
    pipeline_parallel_rank: int
    data_parallel_rank: int
    def __init__(self, rank: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., num_parameters: _Optional[int] = ..., num_blocks: _Optional[int] = ..., pipeline_parallel_rank: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ...) -> None: ...

class CompileReport(_message.Message):
    __slots__ = ("pass_matches",)
    class PassMatchesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PASS_MATCHES_FIELD_NUMBER: _ClassVar[int]
    pass_matches: _containers.ScalarMap[str, int]
    def __init__(self, pass_matches: _Optional[_Mapping[str, int]] = ...) -> None: ...

class GraphReport(_message.Message):
    __slots__ = ("key", "state", "capture_s", "num_bytes", "fault")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    key: _batch_pb2.GraphKey
    state: GraphState
    capture_s: float
    num_bytes: int
    fault: str
    def __init__(self, key: _Optional[_Union[_batch_pb2.GraphKey, _Mapping]] = ..., state: _Optional[_Union[GraphState, str]] = ..., capture_s: _Optional[float] = ..., num_bytes: _Optional[int] = ..., fault: _Optional[str] = ...) -> None: ...

class Recompilation(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class WorkerFailure(_message.Message):
    __slots__ = ("error", "step_id", "has_lost_peer")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_LOST_PEER_FIELD_NUMBER: _ClassVar[int]
    error: str
    step_id: int
    has_lost_peer: bool
    def __init__(self, error: _Optional[str] = ..., step_id: _Optional[int] = ..., has_lost_peer: _Optional[bool] = ...) -> None: ...
