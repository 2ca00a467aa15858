"""Normalises latent vectors and rotates queries and keys: the reference of latent_cache."""

from dataclasses import replace

import torch

from models.operands.latent_entries import LatentEntries, LatentTransform
from models.ops.elementwise.rms_norm import rms_norm
from models.ops.elementwise.rotary import rotary


def transform_latents(
    q_rotated: torch.Tensor, entries: LatentEntries, transform: LatentTransform
) -> tuple[torch.Tensor, LatentEntries]:
    """Returns queries [T, H, P], rotated, and entries, normalised and rotated; all contiguous."""
    rotation = transform.cos, transform.signed_sin
    latent = rms_norm(entries.latent, transform.weight, transform.eps)
    rotated = rotary(entries.rotated, *rotation)
    return rotary(q_rotated, *rotation), replace(entries, latent=latent, rotated=rotated)
