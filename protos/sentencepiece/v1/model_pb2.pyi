from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Model(_message.Message):
    __slots__ = ("pieces", "trainer_spec", "normalizer_spec")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_SPEC_FIELD_NUMBER: _ClassVar[int]
    NORMALIZER_SPEC_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    trainer_spec: TrainerSpec
    normalizer_spec: NormalizerSpec
    def __init__(self, pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., trainer_spec: _Optional[_Union[TrainerSpec, _Mapping]] = ..., normalizer_spec: _Optional[_Union[NormalizerSpec, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("piece", "score", "type")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    piece: str
    score: float
    type: int
    def __init__(self, piece: _Optional[str] = ..., score: _Optional[float] = ..., type: _Optional[int] = ...) -> None: ...

class TrainerSpec(_message.Message):
    __slots__ = ("model_type", "byte_fallback", "bos_id", "eos_id")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    BYTE_FALLBACK_FIELD_NUMBER: _ClassVar[int]
    BOS_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_ID_FIELD_NUMBER: _ClassVar[int]
    model_type: int
    byte_fallback: bool
    bos_id: int
    eos_id: int
    def __init__(self, model_type: _Optional[int] = ..., byte_fallback: _Optional[bool] = ..., bos_id: _Optional[int] = ..., eos_id: _Optional[int] = ...) -> None: ...

class NormalizerSpec(_message.Message):
    __slots__ = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces")
    PRECOMPILED_CHARSMAP_FIELD_NUMBER: _ClassVar[int]
    ADD_DUMMY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    REMOVE_EXTRA_WHITESPACES_FIELD_NUMBER: _ClassVar[int]
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    def __init__(self, precompiled_charsmap: _Optional[bytes] = ..., add_dummy_prefix: _Optional[bool] = ..., remove_extra_whitespaces: _Optional[bool] = ...) -> None: ...
