from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunningRequests(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNING_REQUESTS_UNSPECIFIED: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_FINISH: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_RECOMPUTE: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_KEEP: _ClassVar[RunningRequests]

class SleepMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLEEP_MODE_UNSPECIFIED: _ClassVar[SleepMode]
    SLEEP_MODE_WAIT: _ClassVar[SleepMode]
    SLEEP_MODE_RECOMPUTE: _ClassVar[SleepMode]
    SLEEP_MODE_ABORT: _ClassVar[SleepMode]
RUNNING_REQUESTS_UNSPECIFIED: RunningRequests
RUNNING_REQUESTS_FINISH: RunningRequests
RUNNING_REQUESTS_RECOMPUTE: RunningRequests
RUNNING_REQUESTS_KEEP: RunningRequests
SLEEP_MODE_UNSPECIFIED: SleepMode
SLEEP_MODE_WAIT: SleepMode
SLEEP_MODE_RECOMPUTE: SleepMode
SLEEP_MODE_ABORT: SleepMode

class WeightsUpdate(_message.Message):
    __slots__ = ("version", "running", "is_part")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    IS_PART_FIELD_NUMBER: _ClassVar[int]
    version: str
    running: RunningRequests
    is_part: bool
    def __init__(self, version: _Optional[str] = ..., running: _Optional[_Union[RunningRequests, str]] = ..., is_part: _Optional[bool] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("update", "folder", "shared_memory", "sha256")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    update: WeightsUpdate
    folder: str
    shared_memory: str
    sha256: bytes
    def __init__(self, update: _Optional[_Union[WeightsUpdate, _Mapping]] = ..., folder: _Optional[str] = ..., shared_memory: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: WeightsInfo
    def __init__(self, weights: _Optional[_Union[WeightsInfo, _Mapping]] = ...) -> None: ...

class UploadWeightsRequest(_message.Message):
    __slots__ = ("update", "tensors", "data")
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    update: WeightsUpdate
    tensors: TensorList
    data: bytes
    def __init__(self, update: _Optional[_Union[WeightsUpdate, _Mapping]] = ..., tensors: _Optional[_Union[TensorList, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TensorList(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ...) -> None: ...

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class UploadWeightsResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: WeightsInfo
    def __init__(self, weights: _Optional[_Union[WeightsInfo, _Mapping]] = ...) -> None: ...

class GetWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightsResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: WeightsInfo
    def __init__(self, weights: _Optional[_Union[WeightsInfo, _Mapping]] = ...) -> None: ...

class WeightsInfo(_message.Message):
    __slots__ = ("version", "num_updates", "num_moved_requests", "pause_ms", "is_updating")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_UPDATING_FIELD_NUMBER: _ClassVar[int]
    version: str
    num_updates: int
    num_moved_requests: int
    pause_ms: float
    is_updating: bool
    def __init__(self, version: _Optional[str] = ..., num_updates: _Optional[int] = ..., num_moved_requests: _Optional[int] = ..., pause_ms: _Optional[float] = ..., is_updating: _Optional[bool] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "num_changes")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_CHANGES_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    num_changes: int
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ..., num_changes: _Optional[int] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ("num_changes",)
    NUM_CHANGES_FIELD_NUMBER: _ClassVar[int]
    num_changes: int
    def __init__(self, num_changes: _Optional[int] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "digest", "rank", "num_bytes", "is_resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    rank: int
    num_bytes: int
    is_resident: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., is_resident: _Optional[bool] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level", "mode", "timeout_ms")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: SleepMode
    timeout_ms: int
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[SleepMode, str]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("num_bytes", "took_s")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    took_s: float
    def __init__(self, num_bytes: _Optional[int] = ..., took_s: _Optional[float] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("num_bytes", "took_s")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    took_s: float
    def __init__(self, num_bytes: _Optional[int] = ..., took_s: _Optional[float] = ...) -> None: ...
