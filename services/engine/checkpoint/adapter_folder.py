"""Finds the folder of an adapter that an operator names, on disk or on the hub."""

from pathlib import Path

from models.loading.adapter_config import WEIGHTS_FILE, digest_of
from services.engine.errors import InvalidRequestError, NotPermittedError
from services.hub.names import HubError, HubName, hub_name

MAX_PATH_LENGTH = 4096
HUB_CACHE = ".hub"
"""Folder under --lora-folder for adapters from the hub."""


def start_folder(path: str) -> Path:
    """Returns the folder of an adapter of --lora, fetched if it is a name on the hub.

    Raises:
        InvalidRequestError: it cannot be fetched.
    """
    name = hub_name(path)
    return Path(path).expanduser().absolute() if name is None else _fetched(name, None)


def folder_digest(folder: Path) -> bytes:
    """Returns the digest of an adapter's files, which are not checked.

    Raises:
        InvalidRequestError: one cannot be read.
    """
    try:
        return digest_of(folder, (folder / WEIGHTS_FILE).read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{error.filename}: {error.strerror}", field="path") from None


def folder_under(root: Path | None, path: str) -> Path:
    """Returns the folder of an adapter that is loaded while serving.

    Relative paths begin at `root`. Links that lead out of it are refused like all other paths out
    of it, with one message, which says nothing about the files there.

    Raises:
        NotPermittedError: there is no root, or the path leads out of it.
        InvalidRequestError: the path is malformed, or cannot be fetched.
    """
    if root is None:
        raise NotPermittedError(
            "adapters are not loaded while serving; the engine lacks --lora-folder"
        )
    if not path or len(path) > MAX_PATH_LENGTH or not path.isprintable():
        raise InvalidRequestError(
            f"the path must have 1 to {MAX_PATH_LENGTH} printable characters", field="path"
        )
    root = root.expanduser().resolve()
    folder = (root / path).resolve()
    if not folder.is_relative_to(root):
        raise NotPermittedError("adapters are loaded from --lora-folder alone", field="path")
    name = _hub_name(path)
    if name is not None and not folder.exists():
        folder = _fetched(name, root / HUB_CACHE)
    # A link to a file elsewhere would show it in messages about what is wrong with it.
    entries = [folder, *(folder.iterdir() if folder.is_dir() else ())]
    if not all(each.resolve().is_relative_to(root) for each in entries):
        raise NotPermittedError("adapters are loaded from --lora-folder alone", field="path")
    return folder


def _hub_name(path: str) -> HubName | None:
    try:
        return HubName.parse(path)
    except HubError:
        return None


def _fetched(name: HubName, cache: Path | None) -> Path:
    # Takes a while to import, and most adapters are on disk.
    from services.hub.adapters import fetch_adapter

    try:
        return fetch_adapter(name, cache)
    except HubError as error:
        raise InvalidRequestError(str(error), field="path") from error
