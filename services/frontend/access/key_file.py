"""Reads the file of API keys.

    salt_by_key = true

    [keys.alice]
    sha256 = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    tokens_per_minute = 60000
    max_live_requests = 8

    [keys.operator]
    key = "a key in plain text, 16 characters or more, without blanks"
    may_list_engines = true
    operator = true
    max_priority = 100

    [keys.tenant]
    key = "another key in plain text, 16 characters or more"
    adapters = ["sql", "tenant-*"]

Keys are random and long, so one round of SHA-256 protects them as well as a slow hash would.
"""

import hashlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.settings.regular_file import read_regular_file

MAX_FILE_BYTES = 4 * 2**20
MAX_KEYS = 10_000
MIN_KEY_CHARACTERS = 16
MAX_KEY_CHARACTERS = 512
MAX_PRIORITY = 100
"""The engine's limit; priorities range from its negative to it."""

Limit = Annotated[int, Field(ge=1, le=2**53)]


class KeyFileError(ValueError):
    """The key file cannot be used. The message holds no part of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one key."""

    tokens_per_minute: int | None = None
    """Prompt and output tokens; None for no limit."""
    max_live_requests: int | None = None
    """Concurrent requests; None for no limit."""
    may_list_engines: bool = False
    """Whether the key may list engines and their addresses."""
    is_operator: bool = False
    """Whether the key may load and remove adapters, and put engines to sleep."""
    adapters: tuple[str, ...] | None = None
    """Adapters that the key may use and list: names, or beginnings of names that end with an
    asterisk; None for all."""
    max_priority: int | None = None
    """Highest priority of its requests; None for no limit."""
    salt_key: bytes = field(default=b"", repr=False)
    """Hashed with cache salts, so that keys do not share prefixes; empty leaves salts unchanged."""

    def allows_adapter(self, name: str) -> bool:
        """Whether the key may use and list an adapter."""
        if self.adapters is None:
            return True
        return any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each
            for each in self.adapters
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key of the file."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    limits: Limits


class _Entry(BaseModel):
    # pydantic's errors show the input unless told otherwise.
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    key: (
        Annotated[
            str,
            Field(
                min_length=MIN_KEY_CHARACTERS,
                max_length=MAX_KEY_CHARACTERS,
                pattern=r"\A[!-~]+\z",
            ),
        ]
        | None
    ) = None
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-fA-F]{64}\z")] | None = None
    tokens_per_minute: Limit | None = None
    max_live_requests: Limit | None = None
    may_list_engines: bool = False
    operator: bool = False
    adapters: (
        Annotated[list[Annotated[str, Field(max_length=129)]], Field(max_length=1024)] | None
    ) = None
    max_priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    salt_by_key: bool | None = None


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    salt_by_key: bool = False
    keys: dict[Annotated[str, Field(pattern=r"\A[A-Za-z0-9._@-]{1,64}\z")], _Entry] = Field(
        min_length=1, max_length=MAX_KEYS
    )


def read_key_file(path: Path) -> list[ApiKey]:
    """Returns the keys of a file, at least one.

    Raises:
        KeyFileError: it is unreadable or invalid.
    """
    try:
        content = read_regular_file(path, max_bytes=MAX_FILE_BYTES)
        parsed = _File.model_validate(tomllib.loads(content.decode()))
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise KeyFileError(f"{path}: {_first_problem(error)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} is not TOML: {_without_content(error)}") from None
    return _checked(path, parsed)


def digest_of(key: str) -> bytes:
    """Returns the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def _checked(path: Path, parsed: _File) -> list[ApiKey]:
    keys: dict[bytes, ApiKey] = {}
    for name, entry in parsed.keys.items():
        if (entry.key is None) == (entry.sha256 is None):
            raise KeyFileError(f"{path}: keys.{name} needs one of key and sha256")
        digest = bytes.fromhex(entry.sha256) if entry.sha256 else digest_of(entry.key or "")
        if (other := keys.get(digest)) is not None:
            raise KeyFileError(f"{path}: keys.{name} and keys.{other.name} are the same key")
        is_salted = parsed.salt_by_key if entry.salt_by_key is None else entry.salt_by_key
        limits = Limits(
            tokens_per_minute=entry.tokens_per_minute,
            max_live_requests=entry.max_live_requests,
            may_list_engines=entry.may_list_engines,
            is_operator=entry.operator,
            adapters=None if entry.adapters is None else tuple(entry.adapters),
            max_priority=entry.max_priority,
            salt_key=digest if is_salted else b"",
        )
        keys[digest] = ApiKey(name=name, digest=digest, limits=limits)
    return list(keys.values())


def _first_problem(error: ValidationError) -> str:
    [first, *_] = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part)[:64] for part in first["loc"]) or "the file"
    return f"{where}: {first['msg']}"


def _without_content(error: Exception) -> str:
    """Describes where a file is invalid, without its content, which may hold part of a key."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    _, found, position = str(error).rpartition("(at ")
    return f"at {position.rstrip(')')}" if found else "it cannot be parsed"
