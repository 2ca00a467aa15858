"""Compiled pieces on disk: one file each, named by content, shared by processes without a lock."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.engine.compilation.cache.cache_key import Factors
from services.processes.private_folder import read_private, write_private

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
    Loading an artifact runs its code, so each access checks that only this user can change it.
    """

    folder: Path

    @classmethod
    def open(cls, code_dir: Path, factors: Factors) -> "ArtifactCache":
        """Returns an environment's cache; the first `store` creates its folder.

        Args:
            code_dir: holds the caches of all environments.
            factors: the environment.
        """
        return cls(code_dir / factors.key[:32])

    def load(self, key: str) -> bytes | None:
        """Returns an artifact; None if it is missing or damaged.

        Raises:
            ExposedFolderError: another user can change it.
        """
        return self._read(key + _SUFFIX)

    def load_program(self, name: str) -> bytes | None:
        """Returns a traced program; None if it is missing or damaged."""
        return self._read(name + _PROGRAM_SUFFIX)

    def store_program(self, name: str, payload: bytes) -> None:
        """Writes a traced program; logs a warning if the disk fails."""
        self._write(name + _PROGRAM_SUFFIX, _with_digest(payload))

    def _read(self, name: str) -> bytes | None:
        try:
            content = read_private(self.folder / name)
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
            matches = json.loads(read_private(self.folder / _PASSES))
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
        try:
            write_private(self.folder / name, content)
        except OSError as error:
            log.warning("compiled_piece_not_stored", name=name, error=str(error))


def _with_digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest() + payload


def stored_factors(code_dir: Path) -> Iterator[tuple[ArtifactCache, Factors]]:
    """Yields each environment with artifacts in `code_dir`, and its factors."""
    for path in sorted(code_dir.glob("*/" + _FACTORS)):
        try:
            values = json.loads(read_private(path))
        except (OSError, ValueError):
            continue
        yield ArtifactCache(path.parent), Factors(values)
