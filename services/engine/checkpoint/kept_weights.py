"""Checkpoints that replace a model's weights: an operator's folder, or a copy of what was sent."""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.engine.checkpoint.operator_folder import check_entries, path_under
from services.engine.errors import InvalidRequestError, NotPermittedError
from services.processes.private_folder import ExposedFolderError, make_private

FILE_NAME = "model.safetensors"
SHARED_MEMORY = Path("/dev/shm")
_REFUSAL = "weights are loaded from --weights-folder alone"
_OBJECT_NAME = re.compile(r"[A-Za-z0-9._-]{1,250}")
_PREFIX = ".octavo-weights-"
_LOCK = "lock"
_CHUNK_BYTES = 2**24
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """A checkpoint that stays for as long as its weights serve.

    folder: in Hugging Face form. names: of its tensors, where known. is_ours: whether the folder is
    a copy that goes with this object.
    """

    folder: Path
    names: frozenset[str] | None = None
    is_ours: bool = False
    _state: tuple[tuple[str, int, int], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, folder: Path) -> "KeptWeights":
        """Returns an operator's folder as it is now."""
        return cls(folder, _state=_state_of(folder))

    @property
    def has_changed(self) -> bool:
        """Whether the operator's files are not the ones that were loaded."""
        return not self.is_ours and self._state != _state_of(self.folder)

    def discard(self) -> None:
        """Removes the copy, if it is one."""
        if self.is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)


class WeightsFolder:
    """The operator's folder for weights, with a private one in it for copies.

    The private folder goes with the process. The folder of a killed process goes when another one
    makes its first copy: a lock shows whether its owner lives.
    """

    def __init__(self, root: Path | None) -> None:
        """Makes nothing yet.

        Args:
            root: the operator's; None: no weights may be loaded.
        """
        self._root = root
        self._private: Path | None = None
        self._lock: int | None = None

    def check(self) -> Path:
        """Returns the operator's folder.

        Raises:
            NotPermittedError: there is none.
        """
        if self._root is None:
            raise NotPermittedError("weights do not change here; the engine lacks --weights-folder")
        return self._root.expanduser().resolve()

    def find(self, path: str, sha256: bytes = b"") -> KeptWeights:
        """Returns a checkpoint under the operator's folder; takes long if a digest is compared.

        See operator_folder.

        Raises:
            NotPermittedError: there is no such folder, or the path leads out of it.
            InvalidRequestError: the path is malformed, nothing is there, or the digest differs.
        """
        root = self.check()
        folder = path_under(root, path, field="folder", refusal=_REFUSAL)
        if not folder.is_dir():
            raise InvalidRequestError(f"there is no folder {path!r}", field="folder")
        check_entries(folder, root, field="folder", refusal=_REFUSAL)
        if sha256:
            digest = hashlib.sha256()
            for file in sorted(folder.glob("*.safetensors")):
                with file.open("rb") as content:
                    while chunk := content.read(_CHUNK_BYTES):
                        digest.update(chunk)
            check_digest(digest.digest(), sha256, "the files")
        return KeptWeights.of(folder)

    def copy_shared_memory(self, name: str, sha256: bytes = b"") -> KeptWeights:
        """Returns a copy of a shared memory object; takes long.

        Raises:
            NotPermittedError: another user could have written it.
            InvalidRequestError: there is none, or the digest differs.
        """
        self.check()
        if _OBJECT_NAME.fullmatch(name) is None:
            raise InvalidRequestError("the name is no shared memory's", field="shared_memory")
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            source = os.open(SHARED_MEMORY / name, flags)
        except OSError as error:
            raise InvalidRequestError(
                f"shared memory {name}: {error.strerror}", field="shared_memory"
            ) from None
        with os.fdopen(source, "rb") as content:
            facts = os.fstat(source)
            if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_MAY_WRITE:
                raise NotPermittedError(f"other users can write the shared memory {name}")
            if not stat.S_ISREG(facts.st_mode):
                raise InvalidRequestError(f"{name} is no shared memory", field="shared_memory")
            copy = self.make_copy(facts.st_size)
            try:
                digest = hashlib.sha256()
                with (copy.folder / FILE_NAME).open("xb") as target:
                    while chunk := content.read(_CHUNK_BYTES):
                        target.write(chunk)
                        if sha256:
                            digest.update(chunk)
                if sha256:
                    check_digest(digest.digest(), sha256, f"shared memory {name}")
            except BaseException:
                copy.discard()
                raise
        return copy

    def make_copy(self, num_bytes: int, names: Iterable[str] | None = None) -> KeptWeights:
        """Makes a folder for a copy of `num_bytes`.

        Raises:
            NotPermittedError: there is no folder, or it cannot be written.
            InvalidRequestError: the disk has less room.
        """
        try:
            private = self._private = self._private or self._make_private(self.check())
            room = shutil.disk_usage(private).free
            if num_bytes > room:
                raise InvalidRequestError(
                    f"the weights take {num_bytes} bytes; --weights-folder has room for {room}"
                )
            folder = Path(tempfile.mkdtemp(prefix="copy-", dir=private))
        except (OSError, ExposedFolderError) as error:
            raise NotPermittedError(f"--weights-folder cannot keep weights: {error}") from None
        return KeptWeights(folder, frozenset(names) if names is not None else None, is_ours=True)

    def close(self) -> None:
        """Removes the private folder."""
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._private = self._lock = None

    def _make_private(self, root: Path) -> Path:
        for left in root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                lock = os.open(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)
        private = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        make_private(private)
        self._lock = os.open(private / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return private


def check_digest(found: bytes, wanted: bytes, what: str) -> None:
    """Raises InvalidRequestError unless a digest is the one that the caller gave."""
    if found != wanted:
        raise InvalidRequestError(
            f"the SHA-256 of {what} is {found.hex()}; the update says {wanted.hex()[:64]}"
        )


def _state_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of change of a checkpoint's files."""
    files = [each for each in folder.glob("*") if each.is_file()] if folder.is_dir() else []
    facts = [(each.name, each.stat()) for each in sorted(files)]
    return tuple((name, each.st_size, each.st_mtime_ns) for name, each in facts)
