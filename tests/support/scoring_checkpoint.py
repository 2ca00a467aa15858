"""A checkpoint that scores pairs: the embedded model with a head for one label."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.pooled_engine import save_tensors


def write_scorer(folder: Path) -> torch.Tensor:
    """Writes the embedded model with a random head; returns the head, [1, hidden size]."""
    shutil.copytree(TINY_CHECKPOINT, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    config |= {"architectures": [f"{family}ForSequenceClassification"], "id2label": {"0": "A"}}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    head = torch.randn(1, config["hidden_size"]) / 8
    stored = load_file(folder / "model.safetensors")
    save_tensors(stored | {"score.weight": head}, folder / "model.safetensors")
    return head
