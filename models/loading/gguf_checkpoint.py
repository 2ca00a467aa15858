"""Opens the GGUF files of a model folder; tensors stay on disk until they are read."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from models.config_sections.fields import Fields
from models.gguf.errors import GgufError
from models.gguf.file import GgufTensor
from models.gguf.metadata import Metadata
from models.gguf.model import open_gguf
from models.gguf.tensors import Source, sources
from models.loading.checkpoint_tensor import CheckpointError, CheckpointTensor
from models.loading.gguf_code import GgufCode
from models.loading.gguf_joined import JoinedCode

PATTERN = "*.gguf"
_CONFIG_FILE = "config.json"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_gguf_files(folder: Path) -> list[CheckpointTensor]:
    """Returns every tensor of a folder's GGUF model by its name in a Hugging Face checkpoint.

    The folder has a config.json, and the files of one model.

    Raises:
        CheckpointError: a file is damaged, or has a tensor that its architecture lacks.
        ConfigError: config.json is missing or wrong.
    """
    files = sorted(folder.glob(PATTERN))
    num_layers = Fields.read(folder / _CONFIG_FILE).count("num_hidden_layers")
    try:
        stored = sources(Metadata(open_gguf(files)), num_layers)
        bytes_of = {file: np.memmap(file, dtype=np.uint8, mode="c") for file in files}
    except GgufError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    return [_opened(source, bytes_of) for source in stored]


def _opened(source: Source, bytes_of: Mapping[Path, np.ndarray]) -> CheckpointTensor:
    tensor = source.tensor
    values, shape = _stored(tensor, bytes_of), tensor.shape
    if source.expert is not None:
        values, shape = values[source.expert], shape[1:]
    code = GgufCode(tensor.type, shape, source.paired_heads, source.is_offset)
    if source.layout is None:
        return CheckpointTensor(tensor.file, source.name, values, None if code.is_plain else code)
    if source.second is None:
        joined = JoinedCode((code,), source.layout)
        return CheckpointTensor(tensor.file, source.name, values, joined)
    other = GgufCode(source.second.type, source.second.shape)
    joined = JoinedCode((code, other), source.layout)
    second = _stored(source.second, bytes_of)
    return CheckpointTensor(tensor.file, source.name, values, joined, second)


def _stored(tensor: GgufTensor, bytes_of: Mapping[Path, np.ndarray]) -> torch.Tensor:
    """Returns rows of blocks as uint8, or plain values."""
    raw = bytes_of[tensor.file][tensor.offset : tensor.offset + tensor.num_bytes]
    values = torch.from_numpy(raw).view(*tensor.shape[:-1], tensor.row_bytes)
    is_plain = tensor.type.name in _PLAIN
    return values.view(_PLAIN[tensor.type.name]) if is_plain else values
