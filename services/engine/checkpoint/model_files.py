"""Reads the small files of a model folder, within limits."""

from pathlib import Path

from services.settings.regular_file import read_regular_file


class ModelFolderError(Exception):
    """The model folder cannot be served; the message is for the operator."""


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Returns a file's content.

    Args:
        path: of a regular file.
        max_bytes: limit of its size.

    Raises:
        ModelFolderError: the file is larger, not a regular file, or cannot be read.
    """
    try:
        return read_regular_file(path, max_bytes=max_bytes)
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {error.strerror}") from error


def require_inside(path: Path, folder: Path) -> None:
    """Checks that a file which frontends receive is no link out of its folder.

    Hugging Face's cache links from `snapshots/REVISION` to `blobs`, which is allowed.

    Raises:
        ModelFolderError: the file is a link that leads to another place.
    """
    target, home = path.resolve(), folder.resolve()
    if target.is_relative_to(home):
        return
    is_cached = home.parent.name == "snapshots"
    if not is_cached or not target.is_relative_to(home.parent.parent / "blobs"):
        raise ModelFolderError(f"{path} leads out of the folder, to {target}")
