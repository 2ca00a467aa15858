"""Reads the small files of a model folder, within limits."""

from pathlib import Path

from services.telemetry.regular_file import read_regular_file


class ModelFolderError(Exception):
    """The checkpoint's folder cannot be served; the message is for the operator."""


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Returns a file's content.

    Args:
        path: of a regular file.
        max_bytes: the most that it may have.

    Raises:
        ModelFolderError: it is larger, no regular file, or cannot be read.
    """
    try:
        return read_regular_file(path, max_bytes=max_bytes)
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from error


def require_inside(path: Path, folder: Path) -> None:
    """Checks where a file's content comes from, before it is shown to others.

    Hugging Face's cache keeps the files of `snapshots/REVISION` in `blobs`, to which it links.

    Raises:
        ModelFolderError: the file is a link that leads somewhere else.
    """
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return
    is_cached = home.parent.name == "snapshots"
    if not is_cached or not target.is_relative_to(home.parent.parent / "blobs"):
        raise ModelFolderError(f"{path} leads out of the folder, to {target}")
