"""A checkpoint in which one token is poison: its values are infinite, so its logits are NaN.

It is the embedded model with one channel of the hidden state taken out, which is then non-zero for
the poison alone, and multiplied there by the largest number that the dtype has.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.engine.config.checkpoint import TINY_CHECKPOINT

POISON = 1000
_CHANNEL = 0


def write_poisoned_checkpoint(folder: Path) -> Path:
    """Writes the checkpoint into a folder and returns it."""
    shutil.copytree(TINY_CHECKPOINT, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, _CHANNEL] = 0
    embedding[POISON] = 0
    embedding[POISON, _CHANNEL] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[_CHANNEL] = 0
    values = weights["model.layers.0.self_attn.v_proj.weight"]
    values[:, _CHANNEL] = torch.finfo(values.dtype).max
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
