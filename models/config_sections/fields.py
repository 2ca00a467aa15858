"""Reads the fields of config.json one by one, each with its type checked."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

MAX_FILE_BYTES = 16 * 2**20
"""Largest config.json; released ones have some kilobytes."""

MAX_COUNT = 2**20
"""Largest count of a field that LARGEST does not list."""

LARGEST = {
    "vocab_size": 2**22,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "hidden_size": 2**17,
    "num_hidden_layers": 2**10,
    "num_nextn_predict_layers": 2**10,
    "num_attention_heads": 2**9,
    "num_key_value_heads": 2**9,
    "index_n_heads": 2**9,
    "n_routed_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts": 2**12,
    "n_shared_experts": 2**12,
    "head_dim": 2**11,
    "qk_nope_head_dim": 2**11,
    "qk_rope_head_dim": 2**11,
    "v_head_dim": 2**11,
    "index_head_dim": 2**11,
    "patch_size": 2**10,
    "hc_mult": 2**6,
    "hc_sinkhorn_iters": 2**10,
    "o_groups": 2**9,
    "o_lora_rank": 2**14,
    "compress_rate_csa": 2**12,
    "compress_rate_hca": 2**12,
    "compressed_sparse_attention": 2**12,
    "heavily_compressed_attention": 2**12,
}
"""Field -> its largest value: several times that of any released model, and small enough for the
objects that are made before weights are compared. Positions are 32-bit integers.
"""


SMALLEST_NUMBER, LARGEST_NUMBER = 1e-12, 1e12
"""Bounds of fractional numbers, within which float32 can compute."""


MAX_NAME_LENGTH = 100
"""Longest name of a model class."""


class ConfigError(ValueError):
    """config.json is missing, malformed, or asks for an unsupported feature."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object, each read with its type checked; null counts as absent."""

    file: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, file: Path) -> "Fields":
        """Parses a file that must hold one JSON object."""
        values = read_json(file)
        if not isinstance(values, dict):
            raise ConfigError(f"{file} holds a JSON {type(values).__name__}, not an object")
        return cls(file, values)

    def error(self, name: str, wanted: str) -> ConfigError:
        """Returns an error with the field's file, name and value, and what it must be."""
        value = shown(self.values.get(name))
        return ConfigError(f"{self.file}: {self.prefix}{name} is {value}; it must be {wanted}")

    def has(self, name: str) -> bool:
        """Returns whether the field is present and not null."""
        return self.values.get(name) is not None

    def count(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Reads an integer from `minimum` to its value in LARGEST."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            wanted = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
            raise self.error(name, wanted)
        largest = LARGEST.get(name, MAX_COUNT)
        if value > largest:
            raise self.error(name, f"at most {largest}")
        return value

    def number(self, name: str, default: float | None = None, *, or_zero: bool = False) -> float:
        """Reads a positive number; `or_zero` also allows 0."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if or_zero and type(value) in (int, float) and value == 0:
            return 0.0
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "0 or a positive number" if or_zero else "a positive number")
        if not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
            raise self.error(name, f"from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Reads a list of `length` positive numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"a list of {length} positive numbers")
        each = Fields(self.file, {f"{name}[{i}]": x for i, x in enumerate(value)}, self.prefix)
        return tuple(each.number(key) for key in each.values)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Reads a boolean."""
        value = self.values.get(name)
        if value is None:
            return default
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

    def layer_numbers(self, name: str) -> tuple[int, ...]:
        """Reads a list of layer indices; absent means none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_index(index) for index in value):
            raise self.error(name, "a list of layer numbers from 0")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Reads one token id or a list of them; absent means none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_index(token_id) for token_id in ids):
            raise self.error(name, "a token id or a list of token ids")
        return tuple(ids)

    def section(self, name: str) -> "Fields":
        """Reads a nested object; absent means an empty one."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.file, value, f"{self.prefix}{name}.")

    def with_defaults(self, defaults: dict[str, Any]) -> "Fields":
        """Returns the fields with defaults for absent ones."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return Fields(self.file, {**defaults, **given}, self.prefix)

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """Returns the fields, also by other names (old -> new) where nothing has these."""
        named = {names.get(name, name): value for name, value in self.values.items()}
        return Fields(self.file, named | self.values, self.prefix)

    def architecture(self) -> str:
        """Reads the name of the model class."""
        value = self.values.get("architectures")
        name = value[0] if isinstance(value, list) and len(value) == 1 else None
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH:
            raise self.error("architectures", "a list with the name of one model class")
        return name


def read_json(file: Path) -> Any:
    """Parses a file.

    Raises:
        ConfigError: it is missing, too large or not JSON.
    """
    try:
        # Reading from a pipe would block until it is written.
        status = file.stat()
        is_file, is_small = S_ISREG(status.st_mode), status.st_size <= MAX_FILE_BYTES
        content = file.read_bytes() if is_file and is_small else b"null"
        values = json.loads(content, object_hook=_float_of)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not is_file:
        raise ConfigError(f"{file} is not a regular file")
    if not is_small:
        raise ConfigError(f"{file} has {status.st_size} bytes; the limit is {MAX_FILE_BYTES}")
    return values


def shown(value: object) -> str:
    """Returns a JSON value for a one-line message: long ones lose their middle."""
    shortened = reprlib.Repr()
    shortened.maxlong = shortened.maxstring = shortened.maxother = 80
    return shortened.repr(value)


def _float_of(values: dict[str, Any]) -> Any:
    """Returns the number of an object that transformers writes for what JSON has no number for."""
    name = values.get("__float__")
    is_number = len(values) == 1 and name in ("Infinity", "-Infinity", "NaN")
    return float(str(name)) if is_number else values


def _is_index(value: Any) -> bool:
    """Whether a JSON value is an integer from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
