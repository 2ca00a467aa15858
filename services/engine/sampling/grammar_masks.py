"""Applies grammar masks to logits on the device."""

import numpy as np
import torch
from torch import Tensor

from models.ops.sampling.mask_tokens import mask_tokens
from services.engine.batch import SamplingMetadata, read_int32


def apply_grammars(
    logits: Tensor, sampling: SamplingMetadata, vocab_size: int, *, in_place: bool = False
) -> Tensor:
    """Returns the logits as float32, -inf where a grammar forbids a token.

    Args:
        logits: [S, V]; or [S * n, V] if each row has n - 1 drafts. A row with a grammar has no
            drafts, and its grammar decides the first of the n tokens.
        sampling: the step's, with the masks of at least one of its S rows.
        vocab_size: V.
        in_place: contiguous float32 logits may be overwritten.

    Raises:
        ValueError: the masks do not fit the step's sampling rows or the vocabulary; on a GPU they
            would write wrong memory.
    """
    rows = read_int32(sampling.grammar_rows)
    num_words = -(-vocab_size // 32)
    if len(sampling.grammar_masks) != 4 * num_words * len(rows):
        raise ValueError(
            f"the step's descriptor is invalid: {len(sampling.grammar_masks)} bytes of grammar "
            f"masks for {len(rows)} rows of {num_words} words"
        )
    num_sampling = len(sampling.sample_indices) // 4
    if not (rows[0] >= 0 and rows[-1] < num_sampling and bool((np.diff(rows) > 0).all())):
        raise ValueError("the step's descriptor is invalid: grammar rows outside the batch")
    bits = read_int32(sampling.grammar_masks).reshape(len(rows), num_words)
    masked = logits.to(torch.float32, copy=not in_place).contiguous()
    firsts = torch.from_numpy(rows * (len(masked) // num_sampling))
    mask_tokens(masked, _on(firsts, masked), _on(torch.from_numpy(bits.copy()), masked))
    return masked


def _on(host: Tensor, like: Tensor) -> Tensor:
    """Returns a host tensor on another's device, by an asynchronous copy."""
    if like.device.type == "cpu":
        return host
    return host.pin_memory().to(like.device, non_blocking=True)
