from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: FleetAdapter
    def __init__(self, adapter: _Optional[_Union[FleetAdapter, _Mapping]] = ...) -> None: ...

class RemoveAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[FleetAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[FleetAdapter, _Mapping]]] = ...) -> None: ...

class FleetAdapter(_message.Message):
    __slots__ = ("name", "digest", "num_engines", "num_resident")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    num_engines: int
    num_resident: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., num_engines: _Optional[int] = ..., num_resident: _Optional[int] = ...) -> None: ...
