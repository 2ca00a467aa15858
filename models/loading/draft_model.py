"""Loads a model or a head that guesses tokens for another model."""

from pathlib import Path

import torch

from models.eagle3_config import is_eagle3
from models.layers.decoder import CausalLM
from models.layers.drafting import DraftingModel
from models.loading.eagle3 import load_eagle3
from models.loading.loader import load_model


def load_draft_model(
    folder: Path,
    model: CausalLM,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "safetensors",
    max_positions: int,
) -> DraftingModel:
    """Loads what config.json says: an EAGLE-3 head of `model`, or a model of the same vocabulary.

    Raises:
        ConfigError: config.json is missing, wrong, or names an unsupported model.
        CheckpointError: the weights are missing, damaged, or do not fit.
    """
    if is_eagle3(folder):
        return load_eagle3(
            folder,
            model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            max_positions=max_positions,
        )
    return load_model(
        folder, device=device, dtype=dtype, load_format=load_format, max_positions=max_positions
    )
