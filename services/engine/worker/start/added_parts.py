"""Parts that the operator adds to a loaded model: room for adapters, and a small draft model."""

import torch

from models.layers.adapter_room import make_room
from models.layers.decoder import CausalLM
from models.loading.draft_model import load_draft_model
from services.engine.config.engine_config import EngineConfig


def add_parts(
    model: CausalLM,
    config: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
) -> None:
    """Adds room for adapters, and a small draft model, where the operator wants them.

    Args:
        model: loaded, on `device`.
        config: the engine's.
        device: of the model.
        dtype: of its activations.
        max_positions: most tokens of a sequence.

    Raises:
        ValueError: the draft model does not fit, or experts can have no adapters.
    """
    if config.adapters.max_loras:
        make_room(
            model,
            num_slots=config.adapters.max_loras,
            max_rank=config.adapters.max_lora_rank,
            with_embeddings=config.adapters.lora_embeddings,
            with_experts=config.adapters.lora_experts,
            moves_experts=config.parallel.eplb_interval > 0,
        )
    if config.speculation.draft_model is not None:
        draft = load_draft_model(
            config.speculation.draft_model,
            model,
            device=device,
            dtype=dtype,
            load_format=config.checkpoint.load_format,
            max_positions=max_positions,
        )
        model.draft_models = (draft,)
