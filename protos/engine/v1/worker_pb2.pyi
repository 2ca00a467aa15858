from protos.engine.v1 import batch_pb2 as _batch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerEvent(_message.Message):
    __slots__ = ("progress", "ready", "result", "failure")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    progress: WorkerProgress
    ready: WorkerReady
    result: _batch_pb2.StepResult
    failure: WorkerFailure
    def __init__(self, progress: _Optional[_Union[WorkerProgress, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., result: _Optional[_Union[_batch_pb2.StepResult, _Mapping]] = ..., failure: _Optional[_Union[WorkerFailure, _Mapping]] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("stage",)
    STAGE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    def __init__(self, stage: _Optional[str] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ("num_blocks", "block_bytes", "num_parameters", "load_s", "device_name", "dtype", "graphs")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_bytes: int
    num_parameters: int
    load_s: float
    device_name: str
    dtype: str
    graphs: _containers.RepeatedCompositeFieldContainer[_batch_pb2.GraphKey]
    def __init__(self, num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_parameters: _Optional[int] = ..., load_s: _Optional[float] = ..., device_name: _Optional[str] = ..., dtype: _Optional[str] = ..., graphs: _Optional[_Iterable[_Union[_batch_pb2.GraphKey, _Mapping]]] = ...) -> None: ...

class WorkerFailure(_message.Message):
    __slots__ = ("error", "step_id")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    error: str
    step_id: int
    def __init__(self, error: _Optional[str] = ..., step_id: _Optional[int] = ...) -> None: ...
