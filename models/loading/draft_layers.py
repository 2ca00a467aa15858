"""Finds out whether draft layers have an embedding and a head of their own."""

from collections.abc import Mapping

import torch

from models.deepseek_mtp import DraftLayer
from models.layers.decoder import CausalLM
from models.loading.checkpoint import CheckpointTensor


def share_with_draft_layers(model: CausalLM, stored: Mapping[str, CheckpointTensor] | None) -> None:
    """Gives draft layers the model's embedding and head, unless the checkpoint has others.

    Released checkpoints repeat both in each draft layer. They are compared, because a second copy
    would double their memory. The model has no weights yet; stored is None without a checkpoint.
    """
    stored = stored or {}
    embedding = "model.embed_tokens.weight"
    head = embedding if model.config.tie_word_embeddings else "lm_head.weight"
    for index, layer in enumerate(model.model.layers):
        if not isinstance(layer, DraftLayer):
            continue
        prefix = f"model.layers.{index}"
        if _repeats(stored, f"{prefix}.embed_tokens.weight", embedding):
            layer.embed_tokens = None
        if _repeats(stored, f"{prefix}.shared_head.head.weight", head):
            layer.shared_head.head = None


def _repeats(stored: Mapping[str, CheckpointTensor], name: str, original: str) -> bool:
    """Returns whether a tensor is not stored, or equals another one."""
    if name not in stored:
        return True
    if original not in stored:
        return False  # the loader reports it as missing
    return torch.equal(stored[name].values, stored[original].values)
