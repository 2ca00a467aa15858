"""The headers of all files of one GGUF model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.gguf.errors import GgufError
from models.gguf.file import GgufTensor, Value, read_gguf

_SHARD_COUNT = "split.count"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """One model: the first file's metadata, and the tensors of all files by their names."""

    path: Path
    """The first file, which messages name."""
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def open_gguf(files: Sequence[Path]) -> GgufModel:
    """Reads the headers of a model's file, or of all its shards in order.

    Raises:
        GgufError: a file is missing or damaged, or two have the same tensor.
    """
    headers = [read_gguf(file) for file in files]
    metadata, path = headers[0].metadata, files[0]
    count = metadata.get(_SHARD_COUNT, 1)
    if count != len(files) and (count, len(files)) != (0, 1):
        raise GgufError(f"{path}: it is one of {count} shards; there are {len(files)} of that name")
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise GgufError(f"{header.path}: tensor {tensor.name!r} is in another shard, too")
            tensors[tensor.name] = tensor
    return GgufModel(path, metadata, tensors)
