"""Blocks as files of a private folder: one file a block, checked when it is read.

A file is a header and the block. The header names the format, the model and the block, and has a
digest of all the rest. A file that another model, another program or a crash has left is never
taken for a block: it is removed and counted. Files are written under other names and renamed, so
there is no half of one under its own name, but for a loss of power, which the digest shows.
"""

import contextlib
import hashlib
import io
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from services.engine.kv_cache.host_tier import ENTRY_BYTES
from services.processes.private_folder import (
    ExposedFolderError,
    make_private,
    open_private,
    write_private,
)

_MAGIC = b"octavo-kv-block1"
_HEADER = struct.Struct(f"<16s32s{ENTRY_BYTES}sQ32s")
_SUFFIX = ".block"


class LostBlockError(Exception):
    """A block cannot be had from its file; is_damaged: the file is there and is not the block."""

    def __init__(self, message: str, *, is_damaged: bool) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


class DiskStore:
    """The files of one model's blocks, within a limit of bytes.

    Files beyond the limit go in the order of their last use. Several threads may read while one
    writes.
    """

    def __init__(self, parent: Path, *, identity: bytes, max_bytes: int) -> None:
        """Opens the model's folder, which it makes if there is none.

        Args:
            parent: an absolute path without links.
            identity: 32 bytes that differ between models and forms of their blocks.
            max_bytes: of all files.

        Raises:
            ExposedFolderError: another user can change the folder.
            OSError: it cannot be made.
        """
        self.folder = parent / identity.hex()[:32]
        self._identity = identity
        self._max_bytes = max_bytes
        self._num_bytes = 0
        make_private(self.folder)
        found = []
        for shelf in os.scandir(self.folder):
            for file in os.scandir(shelf.path) if shelf.is_dir(follow_symlinks=False) else ():
                if file.name.endswith(".tmp"):  # a process was killed as it wrote
                    Path(file.path).unlink(missing_ok=True)
                elif (entry := _entry_of(file.name)) is not None:
                    facts = file.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, entry, facts.st_size))
        self._sizes = OrderedDict((entry, size) for _, entry, size in sorted(found))
        self._num_bytes = sum(self._sizes.values())
        self._guard = threading.RLock()

    @property
    def entries(self) -> Collection[bytes]:
        """The blocks that have a file, oldest first."""
        return self._sizes.keys()

    def write(self, entry: bytes, content: memoryview) -> list[bytes]:
        """Writes a block; returns the entries of files that it removed for that.

        Raises:
            OSError: the disk is full or fails; the block has no file then.
            ExposedFolderError: another user can change the folder.
        """
        header = self._header(entry, content)
        removed = []
        size = len(header) + len(content)
        with self._guard:
            while self._sizes and self._num_bytes + size > self._max_bytes:
                oldest = next(iter(self._sizes))
                self.remove(oldest)
                removed.append(oldest)
            has_room = self._num_bytes + size <= self._max_bytes
        if has_room:
            write_private(self._path(entry), header, content)
            with self._guard:
                self._sizes[entry] = size
                self._num_bytes += size
        return removed

    def read(self, entry: bytes, content: memoryview) -> None:
        """Reads a block into memory of its size, and notes that it was used.

        Raises:
            LostBlockError: its file is gone, unreadable, damaged or foreign; it is removed.
        """
        path = self._path(entry)
        try:
            with open_private(path) as file:
                header = file.read(_HEADER.size)
                is_whole = _fill(file, content) and not file.read(1)
        except (OSError, ExposedFolderError) as error:
            self.remove(entry)
            is_damaged = not isinstance(error, FileNotFoundError)
            raise LostBlockError(str(error), is_damaged=is_damaged) from None
        if not is_whole or header != self._header(entry, content):
            self.remove(entry)
            raise LostBlockError(f"{path.name} is damaged or foreign", is_damaged=True)
        with self._guard:
            if entry in self._sizes:
                self._sizes.move_to_end(entry)
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)  # the order outlives this process

    def remove(self, entry: bytes) -> None:
        """Removes a block's file, if there is one."""
        with self._guard:
            self._num_bytes -= self._sizes.pop(entry, 0)
        with contextlib.suppress(OSError):
            self._path(entry).unlink(missing_ok=True)

    def _path(self, entry: bytes) -> Path:
        name = entry.hex()
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _header(self, entry: bytes, content: memoryview) -> bytes:
        facts = (_MAGIC, self._identity, entry, len(content))
        unsigned = _HEADER.pack(*facts, bytes(32))
        digest = hashlib.blake2b(unsigned, digest_size=32)
        digest.update(content)
        return _HEADER.pack(*facts, digest.digest())


def _fill(file: io.FileIO, content: memoryview) -> bool:
    """Reads into all of a memory; returns whether the file had as much."""
    while content and (count := file.readinto(content)):
        content = content[count:]
    return not content


def _entry_of(name: str) -> bytes | None:
    """Returns the entry that a file is named after; None of another file."""
    with contextlib.suppress(ValueError):
        entry = bytes.fromhex(name.removesuffix(_SUFFIX))
        if name.endswith(_SUFFIX) and len(entry) == ENTRY_BYTES:
            return entry
    return None
