"""Loads a model or a head that guesses tokens for another model."""

from pathlib import Path

import torch

from models.eagle3_config import is_eagle3
from models.gemma4_assistant_config import is_assistant
from models.layers.decoder import CausalLM
from models.layers.drafting import DraftingModel
from models.loading.eagle3 import load_eagle3
from models.loading.gemma4_assistant import load_assistant
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
    """Loads what config.json says: a head or an assistant of `model`, or one of its vocabulary.

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
    if is_assistant(folder):
        return load_assistant(folder, model, device=device, dtype=dtype, load_format=load_format)
    return load_model(
        folder, device=device, dtype=dtype, load_format=load_format, max_positions=max_positions
    )
