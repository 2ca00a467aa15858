"""Decides which engines can replace each other."""

from dataclasses import dataclass, fields
from typing import Self

from protos.engine.v1.engine_pb2 import ImageProcessor
from services.frontend.engine_client.messages import ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The properties that must match for one engine to continue another's requests."""

    model: str
    architecture: str
    config_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling: bytes
    image_processor: bytes
    """Empty of a model that sees no images; without the engine's own limit of bytes."""
    pooling: bytes

    @classmethod
    def of(cls, info: ModelInfo) -> Self:
        """Reads the properties of an engine's model."""
        return cls(
            model=info.model,
            architecture=info.architecture,
            config_sha256=info.config_sha256,
            tokenizer_sha256=info.tokenizer_sha256,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=tuple(info.eos_token_ids),
            default_sampling=info.default_sampling.SerializeToString(deterministic=True),
            image_processor=packed_processor(info),
            pooling=info.pooling.SerializeToString(deterministic=True),
        )

    def difference(self, other: "ModelIdentity") -> str:
        """Describes the first field that differs; empty if none does."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"its {field.name} is {_shown(theirs)}, theirs is {_shown(ours)}"
        return ""


def packed_processor(info: ModelInfo) -> bytes:
    """Returns what decides how an image is read; empty of a model that sees none."""
    processor = ImageProcessor()
    processor.CopyFrom(info.image_processor)
    processor.ClearField("max_image_bytes")
    packed: bytes = processor.SerializeToString(deterministic=True)
    return packed


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
