"""Reads a checkpoint's config.json into the one object that model code is built from. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from models.quantization_config import QuantizationConfig, QuantizationError

CONFIG_FILE = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")


class ConfigError(ValueError):
    """config.json is missing, malformed, or asks for something that is not supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; the fields below `factor` matter to rope_type llama3 only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model, with the names that Hugging Face checkpoints use."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """Dtype of the stored weights, one of DTYPES."""
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None = None
    """How weights are stored, if not in `dtype`."""

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads and checks `folder`/config.json.

        Raises:
            ConfigError: the file is missing or not JSON, a field is missing or ill-typed, or the
                model needs something that is not supported. Names the file, field and value.
        """
        fields = _Fields.read(folder / CONFIG_FILE)
        _refuse_unsupported(fields)
        hidden_size = fields.count("hidden_size")
        num_heads = fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of {num_heads} attention heads")
        return cls(
            architecture=fields.architecture(),
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_hidden_layers=fields.count("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=_head_dim(fields, hidden_size, num_heads),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=_rope(fields),
            max_position_embeddings=fields.count("max_position_embeddings"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            dtype=_dtype(fields),
            eos_token_ids=fields.token_ids("eos_token_id"),
            quantization=_quantization(fields),
        )


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of one JSON object, each read with its type checked; null counts as absent."""

    file: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, file: Path) -> "_Fields":
        """Parses a file that must hold one JSON object."""
        try:
            # Reading from a pipe would wait for whoever writes to it.
            is_file = S_ISREG(file.stat().st_mode)
            values = json.loads(file.read_bytes()) if is_file else None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not JSON: {error}") from error
        if not is_file:
            raise ConfigError(f"{file} is not a regular file")
        if not isinstance(values, dict):
            raise ConfigError(f"{file} holds a JSON {type(values).__name__}, not an object")
        return cls(file, values)

    def error(self, name: str, wanted: str) -> ConfigError:
        """Says which field of which file is wrong, its value, and what it must be."""
        return ConfigError(
            f"{self.file}: {self.prefix}{name} is {self.values.get(name)!r}; it must be {wanted}"
        )

    def has(self, name: str) -> bool:
        """Returns whether the field is present and not null."""
        return self.values.get(name) is not None

    def count(self, name: str, default: int | None = None) -> int:
        """Reads a positive integer."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a positive number."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Reads a boolean; absent means false."""
        value = self.values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Reads a string out of a closed set."""
        value = self.values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.error(name, f"one of {', '.join(choices)}")
        return str(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Reads one token id or a list of them; absent means none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(ids)

    def section(self, name: str) -> "_Fields":
        """Reads a nested object; absent means an empty one."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return _Fields(self.file, value, f"{self.prefix}{name}.")

    def architecture(self) -> str:
        """Reads the name of the model class."""
        value = self.values.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise self.error("architectures", "a list with the name of one model class")
        return value[0]


def _refuse_unsupported(fields: _Fields) -> None:
    """Raises ConfigError where ignoring a field would give wrong output."""
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.flag("use_sliding_window"):
        raise fields.error("use_sliding_window", "false; sliding windows are not supported")
    layer_types = fields.values.get("layer_types") or ()
    if any(kind != "full_attention" for kind in layer_types):
        raise fields.error("layer_types", "full_attention for every layer")


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    """Returns the size of one head: explicit, or an equal share of the hidden size."""
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("head_dim", f"given, as {num_heads} heads do not divide {hidden_size}")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "even, as rotary embedding turns pairs")
    return head_dim


def _rope(fields: _Fields) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older files."""
    scaling = fields.section("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta", 10_000.0)
    type_name = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    rope_type = scaling.choice(type_name, ROPE_TYPES, "default")
    for section in (fields, scaling):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise section.error("partial_rotary_factor", "1; partial rotation is not supported")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = scaling.number("factor")
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=factor)
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.count("original_max_position_embeddings"),
    )


def _dtype(fields: _Fields) -> str:
    """Reads `dtype`, or `torch_dtype` of older files."""
    return fields.choice("dtype" if fields.has("dtype") else "torch_dtype", DTYPES, "float32")


def _quantization(fields: _Fields) -> QuantizationConfig | None:
    """Reads `quantization_config`; None if weights are stored as they are."""
    if not fields.has("quantization_config"):
        return None
    try:
        return QuantizationConfig.from_fields(fields.section("quantization_config").values)
    except QuantizationError as error:
        raise ConfigError(f"{fields.file}: {error}") from error
