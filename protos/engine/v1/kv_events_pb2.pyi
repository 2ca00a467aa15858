from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_GPU: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]
    KV_TIER_DISK: _ClassVar[KvTier]
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_GPU: KvTier
KV_TIER_HOST: KvTier
KV_TIER_DISK: KvTier

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("cursors",)
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    cursors: _containers.RepeatedCompositeFieldContainer[KvEventCursor]
    def __init__(self, cursors: _Optional[_Iterable[_Union[KvEventCursor, _Mapping]]] = ...) -> None: ...

class KvEventCursor(_message.Message):
    __slots__ = ("data_parallel_rank", "sequence_number")
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    data_parallel_rank: int
    sequence_number: int
    def __init__(self, data_parallel_rank: _Optional[int] = ..., sequence_number: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("data_parallel_rank", "sequence_number", "snapshot", "events")
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    data_parallel_rank: int
    sequence_number: int
    snapshot: KvSnapshotPart
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, data_parallel_rank: _Optional[int] = ..., sequence_number: _Optional[int] = ..., snapshot: _Optional[_Union[KvSnapshotPart, _Mapping]] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvSnapshotPart(_message.Message):
    __slots__ = ("index", "count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    cleared: KvCacheCleared
    def __init__(self, stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("tier", "parent_key", "keys", "token_ids", "adapter")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    parent_key: bytes
    keys: bytes
    token_ids: bytes
    adapter: str
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., parent_key: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., adapter: _Optional[str] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("tier", "keys")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    keys: bytes
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
