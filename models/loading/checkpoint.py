"""Reads the tensors of a checkpoint folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint is incomplete, damaged, or does not fit the model its config describes."""


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One stored tensor, on the CPU and backed by its memory-mapped file."""

    file: Path
    name: str
    values: torch.Tensor


def iterate_tensors(folder: Path) -> Iterator[CheckpointTensor]:
    """Yields every tensor of a checkpoint once, file by file.

    With an index, a tensor that lies in several files is taken from the one the index names.

    Raises:
        CheckpointError: the folder, a file or a tensor is missing, or a file is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if (folder / INDEX_FILE).exists():
        for file_name, names in _read_index(folder / INDEX_FILE).items():
            yield from _iterate_file(folder / file_name, names)
    elif (folder / SINGLE_FILE).exists():
        yield from _iterate_file(folder / SINGLE_FILE, None)
    else:
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_index(index_file: Path) -> dict[str, list[str]]:
    """Returns the tensor names to take from each file."""
    try:
        entries = json.loads(index_file.read_bytes())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_file} has no readable weight_map: {error!r}") from error
    names_by_file: dict[str, list[str]] = {}
    for name, file_name in entries:
        # A plain name cannot lead out of the folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index_file}: {name} is in {file_name!r}, not a file name")
        names_by_file.setdefault(file_name, []).append(name)
    return names_by_file


def _iterate_file(file: Path, names: list[str] | None) -> Iterator[CheckpointTensor]:
    """Yields the named tensors of one file, or all of them."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as tensors:
            stored = set(tensors.keys())
            for name in sorted(stored) if names is None else names:
                if name not in stored:
                    raise CheckpointError(f"{file}: tensor {name} is missing")
                yield CheckpointTensor(file, name, tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
