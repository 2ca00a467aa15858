"""Distinguishes checkpoints without reading their large tensors."""

import hashlib
from pathlib import Path

import torch

from models.config_sections.fields import Fields
from models.loading.checkpoint import open_checkpoint

CONFIG_FILE = "config.json"


def checkpoint_digest(folder: Path, load_format: str) -> str:
    """Returns a digest of a checkpoint's config, its headers and its vectors.

    Training changes the vectors, norms and biases, too, and every rank needs them; of matrices it
    reads a part.

    Raises:
        ConfigError: config.json is missing or wrong.
        CheckpointError: a file is missing or damaged.
    """
    Fields.read(folder / CONFIG_FILE)
    config = (folder / CONFIG_FILE).read_bytes()
    if load_format == "safetensors":
        return tensors_digest(folder, config)
    return hashlib.sha256(config).hexdigest()


def tensors_digest(folder: Path, beginning: bytes = b"") -> str:
    """Returns a digest of some bytes and of a checkpoint's headers and vectors.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    digest = hashlib.sha256(beginning)
    for tensor in sorted(open_checkpoint(folder), key=lambda each: each.name):
        values = tensor.values
        digest.update(f"{tensor.name} {values.dtype} {tuple(values.shape)}\n".encode())
        if values.dim() == 1:
            digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
