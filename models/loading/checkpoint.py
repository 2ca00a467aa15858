"""Opens the files of a checkpoint folder; tensors stay on disk until they are read."""

import json
from pathlib import Path
from stat import S_ISREG

from safetensors import SafetensorError, safe_open

from models.loading.checkpoint_tensor import CheckpointError as CheckpointError
from models.loading.checkpoint_tensor import CheckpointTensor as CheckpointTensor
from models.loading.gguf_checkpoint import PATTERN, open_gguf_files
from models.loading.header import find_damage

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def open_checkpoint(folder: Path) -> list[CheckpointTensor]:
    """Returns every tensor of a checkpoint once, file by file in byte order.

    Only headers are read. With an index, a tensor that several files have is taken from the one
    that the index names.

    Raises:
        CheckpointError: the folder, a file or a tensor is missing, or a file is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    index_file, single_file = folder / INDEX_FILE, folder / SINGLE_FILE
    if _is_entry(index_file):
        return [
            tensor
            for file_name, names in _read_index(index_file).items()
            for tensor in _open_file(folder / file_name, names)
        ]
    if _is_entry(single_file):
        return _open_file(single_file, None)
    if next(folder.glob(PATTERN), None) is not None:
        return open_gguf_files(folder)
    raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _is_entry(file: Path) -> bool:
    """Returns whether the folder has such an entry, even a broken link."""
    return file.exists() or file.is_symlink()


def _check_regular(file: Path) -> None:
    """Raises CheckpointError unless `file` can be read without waiting."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not S_ISREG(mode):
        raise CheckpointError(f"{file} is not a regular file")


def _read_index(index_file: Path) -> dict[str, set[str]]:
    _check_regular(index_file)
    try:
        entries = json.loads(index_file.read_bytes())["weight_map"].items()
    except OSError as error:
        raise CheckpointError(f"{index_file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_file} has no readable weight_map: {error!r}") from error
    names_by_file: dict[str, set[str]] = {}
    for name, file_name in entries:
        # A plain name cannot lead out of the folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index_file}: {name} is in {file_name!r}, not a file name")
        names_by_file.setdefault(file_name, set()).add(name)
    return names_by_file


def _open_file(file: Path, names: set[str] | None) -> list[CheckpointTensor]:
    """Returns the named tensors of one file, or all of them, in byte order."""
    _check_regular(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = tensors.offset_keys()
            if names is not None and not names.issubset(stored):
                absent = min(names.difference(stored))
                raise CheckpointError(f"{file}: tensor {absent} is missing")
            return [
                CheckpointTensor(file, name, tensors.get_tensor(name))
                for name in stored
                if names is None or name in names
            ]
    except (SafetensorError, OSError) as error:
        damage = find_damage(file)
        raise CheckpointError(f"{file} is damaged: {damage or error}") from error
