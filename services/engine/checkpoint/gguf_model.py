"""Makes a folder in Hugging Face form for a GGUF model: JSON files, and links to its own files."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from models.gguf.checkpoint_files import checkpoint_files
from models.gguf.errors import GgufError
from models.gguf.model import open_gguf
from services.engine.checkpoint.model_files import ModelFolderError
from services.hub.gguf_files import SUFFIX, choose_files, shard_names
from services.hub.names import HubError
from services.processes.private_folder import ExposedFolderError, make_private, write_private

_OTHER_FORMATS = ("model.safetensors", "model.safetensors.index.json")
_DIGEST_CHARACTERS = 32


def gguf_files(model: Path, wanted: str) -> tuple[Path, ...]:
    """Returns the files of a GGUF model; none if the model is in another format.

    Args:
        model: a file, a folder, or a path that does not exist.
        wanted: the file in the folder; empty: the only one, if there are no safetensors.

    Raises:
        HubError: the folder has none, several, or not all shards of one.
    """
    if model.suffix == SUFFIX and not model.is_dir():
        return tuple(model.with_name(name) for name in shard_names(model.name))
    has_others = any((model / name).exists() for name in _OTHER_FORMATS)
    if not model.is_dir() or (has_others and not wanted):
        return ()
    place = (model / wanted).parent if wanted else model
    if not place.resolve().is_relative_to(model.resolve()):
        raise HubError(f"--gguf-file {wanted} leads out of {model}")
    names = [path.relative_to(model).as_posix() for path in place.glob(f"*{SUFFIX}")]
    if not names and not wanted:
        return ()
    return tuple(model / name for name in choose_files(str(model), names, wanted))


def made_folder(files: tuple[Path, ...], parent: Path) -> Path:
    """Returns the folder of a GGUF model, after making it.

    Its name is a digest of what it has, so it is made once for a model.

    Args:
        files: all shards, in order.
        parent: a private folder.

    Raises:
        ModelFolderError: a file is damaged or not supported, or the folder cannot be made.
    """
    try:
        contents = checkpoint_files(open_gguf(files))
    except GgufError as error:
        raise ModelFolderError(str(error)) from error
    folder = parent / _digest(files, contents)
    try:
        make_private(folder)
        for name, content in contents.items():
            write_private(folder / name, content)
        for number, file in enumerate(files, 1):
            _link(folder / f"model-{number:05}-of-{len(files):05}{SUFFIX}", file.resolve())
    except ExposedFolderError as error:
        raise ModelFolderError(str(error)) from error
    except OSError as error:
        raise ModelFolderError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _digest(files: tuple[Path, ...], contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.resolve()}\n".encode())
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _link(path: Path, target: Path) -> None:
    """Makes a link, at once for readers."""
    if path.is_symlink() and path.readlink() == target:
        return
    draft = path.with_name(f".{os.getpid()}-{os.urandom(8).hex()}.tmp")
    draft.symlink_to(target)
    draft.replace(path)
