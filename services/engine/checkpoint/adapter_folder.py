"""Finds the folder of an adapter that an operator names, on disk or on the hub."""

from pathlib import Path

from models.loading.adapter_config import WEIGHTS_FILE, digest_of
from services.engine.checkpoint.operator_folder import check_entries, path_under
from services.engine.errors import InvalidRequestError, NotPermittedError
from services.hub.names import HubError, HubName, hub_name

_REFUSAL = "adapters are loaded from --lora-folder alone"
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
    """Returns the folder of an adapter that is loaded while serving; see operator_folder.

    Raises:
        NotPermittedError: there is no root, or the path leads out of it.
        InvalidRequestError: the path is malformed, or cannot be fetched or read.
    """
    if root is None:
        raise NotPermittedError(
            "adapters are not loaded while serving; the engine lacks --lora-folder"
        )
    root = root.expanduser().resolve()
    folder = path_under(root, path, field="path", refusal=_REFUSAL)
    name = _hub_name(path)
    if name is not None and not folder.exists():
        folder = _fetched(name, root / HUB_CACHE)
    check_entries(folder, root, field="path", refusal=_REFUSAL)
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
