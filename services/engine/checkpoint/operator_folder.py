"""Paths that callers name under a folder of the operator."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.engine.errors import InvalidRequestError, NotPermittedError

MAX_PATH_LENGTH = 4096


def path_under(root: Path, path: str, *, field: str, refusal: str) -> Path:
    """Returns a path under the operator's folder, whether something is there or not.

    Relative paths begin at the folder. Links that lead out of it are refused like all other paths
    out of it, with one message, which says nothing about the files there.

    Args:
        root: the folder, resolved.
        path: of the caller.
        field: of the request.
        refusal: the message.

    Raises:
        NotPermittedError: the path leads out of the folder.
        InvalidRequestError: it is malformed, or has a link to itself.
    """
    if not path or len(path) > MAX_PATH_LENGTH or not path.isprintable():
        raise InvalidRequestError(
            f"the path must have 1 to {MAX_PATH_LENGTH} printable characters", field=field
        )
    found = _resolved(root / path, field)
    if not found.is_relative_to(root):
        raise NotPermittedError(refusal, field=field)
    with _followed(field):
        found.exists()  # fails for names that are too long
    return found


def check_entries(folder: Path, root: Path, *, field: str, refusal: str) -> None:
    """Refuses a folder that is, or has, a link out of the operator's folder.

    A link to a file elsewhere would show it in messages about what is wrong with it.

    Raises:
        NotPermittedError: there is such a link.
        InvalidRequestError: the folder cannot be read, or has a link to itself.
    """
    with _followed(field):
        entries = [folder, *(folder.iterdir() if folder.is_dir() else ())]
    if not all(_resolved(each, field).is_relative_to(root) for each in entries):
        raise NotPermittedError(refusal, field=field)


def _resolved(path: Path, field: str) -> Path:
    with _followed(field):
        return path.resolve()


@contextmanager
def _followed(field: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError:  # of links to themselves, before Python 3.13
        raise InvalidRequestError("the path has a link to itself", field=field) from None
    except OSError as error:
        text = f"the folder cannot be read: {error.strerror}"
        raise InvalidRequestError(text, field=field) from None
