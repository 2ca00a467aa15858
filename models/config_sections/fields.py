"""Reads the fields of config.json one by one, each with its type checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any


class ConfigError(ValueError):
    """config.json is missing, malformed, or asks for something that is not supported."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object, each read with its type checked; null counts as absent."""

    file: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, file: Path) -> "Fields":
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

    def count(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Reads an integer that is not less than `minimum`."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            wanted = "a positive integer" if minimum == 1 else f"an integer from {minimum} on"
            raise self.error(name, wanted)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a positive number."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(name, "a positive number")
        return float(value)

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
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
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
        """Returns the fields with values for those that are absent."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return Fields(self.file, {**defaults, **given}, self.prefix)

    def architecture(self) -> str:
        """Reads the name of the model class."""
        value = self.values.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise self.error("architectures", "a list with the name of one model class")
        return value[0]


def _is_index(value: Any) -> bool:
    """Whether a JSON value is a number that can count from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
