from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeMessage(_message.Message):
    __slots__ = ("hello", "proof", "event", "end", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    proof: NodeProof
    event: RankEvent
    end: RankEnd
    beat: Beat
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., proof: _Optional[_Union[NodeProof, _Mapping]] = ..., event: _Optional[_Union[RankEvent, _Mapping]] = ..., end: _Optional[_Union[RankEnd, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class HeadMessage(_message.Message):
    __slots__ = ("hello", "welcome", "start", "command", "show_stacks", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SHOW_STACKS_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: HeadHello
    welcome: NodeWelcome
    start: RankStart
    command: RankCommand
    show_stacks: StacksOrder
    beat: Beat
    def __init__(self, hello: _Optional[_Union[HeadHello, _Mapping]] = ..., welcome: _Optional[_Union[NodeWelcome, _Mapping]] = ..., start: _Optional[_Union[RankStart, _Mapping]] = ..., command: _Optional[_Union[RankCommand, _Mapping]] = ..., show_stacks: _Optional[_Union[StacksOrder, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("version", "nonce", "node")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    version: str
    nonce: bytes
    node: int
    def __init__(self, version: _Optional[str] = ..., nonce: _Optional[bytes] = ..., node: _Optional[int] = ...) -> None: ...

class HeadHello(_message.Message):
    __slots__ = ("version", "nonce", "proof")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    version: str
    nonce: bytes
    proof: bytes
    def __init__(self, version: _Optional[str] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class NodeProof(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class NodeWelcome(_message.Message):
    __slots__ = ("node", "silence_timeout_ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SILENCE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    node: int
    silence_timeout_ms: int
    def __init__(self, node: _Optional[int] = ..., silence_timeout_ms: _Optional[int] = ...) -> None: ...

class RankStart(_message.Message):
    __slots__ = ("rank", "config", "meeting_address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    MEETING_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    config: str
    meeting_address: str
    def __init__(self, rank: _Optional[int] = ..., config: _Optional[str] = ..., meeting_address: _Optional[str] = ...) -> None: ...

class RankCommand(_message.Message):
    __slots__ = ("rank", "command")
    RANK_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    command: bytes
    def __init__(self, rank: _Optional[int] = ..., command: _Optional[bytes] = ...) -> None: ...

class StacksOrder(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("rank", "event")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    event: bytes
    def __init__(self, rank: _Optional[int] = ..., event: _Optional[bytes] = ...) -> None: ...

class RankEnd(_message.Message):
    __slots__ = ("rank", "error", "was_killed")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WAS_KILLED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    error: str
    was_killed: bool
    def __init__(self, rank: _Optional[int] = ..., error: _Optional[str] = ..., was_killed: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
