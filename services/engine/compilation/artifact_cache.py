"""Compiled pieces on disk: one file each, named by content, shared by processes without a lock."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.engine.compilation.cache_key import Factors

log = structlog.get_logger()

TRACES = "traces"
"""Folder of traced programs inside the one of compiled pieces."""
_FACTORS = "factors.json"
_PASSES = "passes.json"
_SUFFIX = ".piece"
_PROGRAM_SUFFIX = ".program"
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class ArtifactCache:
    """The artifacts compiled in one environment, that is with the same factors.

    Files are written whole and carry a digest: an interrupted write or a damaged file is a miss.
    Loading an artifact runs its code, so only the owner may access the folder.
    """

    folder: Path

    @classmethod
    def open(cls, cache_dir: Path, factors: Factors) -> "ArtifactCache":
        """Returns an environment's cache; the first `store` creates its folder.

        Args:
            cache_dir: holds the caches of all environments.
            factors: the environment.
        """
        return cls(cache_dir.expanduser() / factors.key[:32])

    def load(self, key: str) -> bytes | None:
        """Returns an artifact; None if it is missing or damaged."""
        return self._read(key + _SUFFIX)

    def load_program(self, name: str) -> bytes | None:
        """Returns a traced program; None if it is missing or damaged."""
        return self._read(name + _PROGRAM_SUFFIX)

    def store_program(self, name: str, payload: bytes) -> None:
        """Writes a traced program; logs a warning if the disk fails."""
        self._write(name + _PROGRAM_SUFFIX, _with_digest(payload))

    def _read(self, name: str) -> bytes | None:
        try:
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        payload = content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
            log.warning("compiled_piece_found_damaged", name=name)
            return None
        return payload

    def store(self, key: str, payload: bytes) -> None:
        """Writes an artifact; logs a warning if the disk fails."""
        self._write(key + _SUFFIX, _with_digest(payload))

    def store_matches(self, matches: Mapping[str, int]) -> None:
        """Writes the matches of each compiler pass, for `load_matches`."""
        self._write(_PASSES, json.dumps(matches).encode())

    def load_matches(self) -> Mapping[str, int]:
        """Returns the matches of each compiler pass, by name; empty if unknown."""
        try:
            matches = json.loads((self.folder / _PASSES).read_text())
        except (OSError, ValueError):
            return {}
        return matches if isinstance(matches, dict) else {}

    def describe(self, factors: Factors) -> None:
        """Writes the factors, for `stored_factors`."""
        if not (self.folder / _FACTORS).exists():
            text = json.dumps(factors.values, indent=1, sort_keys=True)
            self._write(_FACTORS, text.encode())

    @property
    def num_artifacts(self) -> int:
        """Artifacts on disk."""
        return len(list(self.folder.glob("*" + _SUFFIX)))

    @property
    def program_names(self) -> list[str]:
        """Names of the traced programs on disk, sorted."""
        return sorted(path.stem for path in self.folder.glob("*" + _PROGRAM_SUFFIX))

    def _write(self, name: str, content: bytes) -> None:
        temporary = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.folder)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            Path(temporary).replace(self.folder / name)
        except OSError as error:
            log.warning("compiled_piece_not_stored", name=name, error=str(error))
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)


def _with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def stored_factors(cache_dir: Path) -> Iterator[tuple[ArtifactCache, Factors]]:
    """Yields each environment with artifacts in `cache_dir`, and its factors."""
    for path in sorted(cache_dir.expanduser().glob("*/" + _FACTORS)):
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        yield ArtifactCache(path.parent), Factors(values)
