"""Folders that no other user of the machine can change, for code that a process loads.

A folder is private if it is ours and closed to others, and if no other user can put another one in
its place. So each folder above it belongs to root or to us, and

- only its owner may write to it, or a group without other members, or
- it is sticky, so that only the owner of an entry may move it.

In a container, the root of a mounted volume may be as the operator has made it: Kubernetes mounts
volumes with mode 2775 or 0777, and the operator decides which containers write there.

Paths are resolved first, then walked folder by folder without following links.
"""

import contextlib
import grp
import io
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"
_ROOT = "root"


class ExposedFolderError(ValueError):
    """Another user can change a file or folder; the message names it and says how."""


def private_path(parent: Path) -> Path:
    """Returns the path of this user's own folder in `parent`, without links; makes nothing."""
    return Path(os.path.realpath(parent.expanduser()), f"private-{os.geteuid()}")


def make_private(folder: Path) -> None:
    """Makes a folder and those above it, if they are missing, and checks all of them.

    Args:
        folder: an absolute path without links.

    Raises:
        ExposedFolderError: another user can change it.
        OSError: it cannot be made.
    """
    with _opened(folder, make=True):
        pass


def read_private(path: Path) -> bytes:
    """Returns the content of a file in a private folder.

    Raises:
        ExposedFolderError: another user can change it, or could when it was written.
        OSError: it cannot be read.
    """
    with open_private(path) as file:
        return file.read()


def open_private(path: Path) -> io.FileIO:
    """Opens a file in a private folder to be read, without a buffer.

    Raises:
        ExposedFolderError: another user can change it, or could when it was written.
        OSError: it cannot be opened.
    """
    with _opened(path.parent) as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path.name, flags, dir_fd=folder)
    file = io.FileIO(fd, "rb")
    try:
        _check_own(os.fstat(fd), path)
    except BaseException:
        file.close()
        raise
    return file


def write_private(path: Path, *content: bytes | memoryview) -> None:
    """Replaces a file in a private folder, which it makes; readers see all of it or nothing.

    content: of the file, in pieces.

    Raises:
        ExposedFolderError: another user can change the folder.
        OSError: the file cannot be written.
    """
    draft = f".{os.getpid()}-{os.urandom(8).hex()}.tmp"  # other hosts may share the folder
    with _opened(path.parent, make=True) as folder:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                for piece in content:
                    file.write(piece)
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a private folder for sockets and drafts, which is removed with the object.

    Raises:
        ExposedFolderError: another user can change it.
        OSError: it cannot be made.
    """
    folder = os.path.realpath(tempfile.gettempdir())
    made = tempfile.TemporaryDirectory(prefix="octavo-", dir=folder, ignore_cleanup_errors=True)
    try:
        make_private(Path(made.name))
    except BaseException:
        made.cleanup()
        raise
    return made


@contextlib.contextmanager
def _opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Opens a private folder, for paths relative to it."""
    path = Path(folder.root)
    fd = os.open(path, _WALK)
    try:
        for name in folder.parts[1:]:
            _check_above(fd, path)
            inner = _open_in(fd, path / name, make=make)
            os.close(fd)
            fd, path = inner, path / name
        found = os.fstat(fd)
        _check_own(found, path)
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IRWXU)  # fchmod refuses what _WALK opens
        yield fd
    finally:
        os.close(fd)


def _open_in(outer: int, path: Path, *, make: bool) -> int:
    """Opens the folder `path` in the open folder `outer`."""
    try:
        return os.open(path.name, _WALK, dir_fd=outer)
    except FileNotFoundError:
        if not make:
            raise
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(path.name, dir_fd=outer, follow_symlinks=False).st_mode):
            raise ExposedFolderError(f"{path} is a link, which may lead elsewhere later") from None
        raise
    with contextlib.suppress(FileExistsError):  # another process of ours was first
        os.mkdir(path.name, stat.S_IRWXU, dir_fd=outer)
    return os.open(path.name, _WALK, dir_fd=outer)


def _check_above(fd: int, path: Path) -> None:
    """Checks that no other user can replace what is in a folder."""
    found = os.fstat(fd)
    if found.st_uid not in (0, os.geteuid()):
        fault = f"it belongs to uid {found.st_uid}"
    elif _others_may_write(found) and not found.st_mode & stat.S_ISVTX:
        fault = f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    if not (_is_in_container() and _is_mounted(fd)):
        raise ExposedFolderError(f"other users can change what is in {path}: {fault}")


def _check_own(found: os.stat_result, path: Path) -> None:
    """Checks that a file or folder is ours and that no other user could write to it."""
    if found.st_uid != os.geteuid():
        raise ExposedFolderError(f"{path} belongs to another user, uid {found.st_uid}")
    if _others_may_write(found):
        mode = stat.S_IMODE(found.st_mode)
        raise ExposedFolderError(f"other users may have written to {path} (mode {mode:04o})")


def _others_may_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether a group has no members but us and root: the private group that many systems make."""
    try:
        group = grp.getgrgid(gid)
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name in (user, _ROOT) and {*group.gr_mem} <= {user, _ROOT}


def _is_in_container() -> bool:
    is_marked = any(mark.exists() for mark in _CONTAINER_MARKS)
    return is_marked or _KUBERNETES_VARIABLE in os.environ


def _is_mounted(fd: int) -> bool:
    """Whether an open folder is the root of a mount."""
    outer = os.open("..", _WALK, dir_fd=fd)
    try:
        return _mount_of(fd) != _mount_of(outer)
    finally:
        os.close(outer)


def _mount_of(fd: int) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return next(line for line in lines if line.startswith("mnt_id:"))
