"""Tokens that a grammar rules out, on the device."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.ops.sampling.mask_tokens import mask_tokens
from services.engine.batch import SamplingMetadata, read_int32


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarMasks:
    """Which tokens G of a batch's S rows may choose.

    num_sampling: S. rows: [G] int32, which rows of the batch.
    bits: [G, ceil(V / 32)] int32, packed.
    """

    num_sampling: int
    rows: Tensor
    bits: Tensor

    @classmethod
    def read(cls, sampling: SamplingMetadata, vocab_size: int) -> "GrammarMasks":
        """Views the masks of a step on the host; there is at least one.

        Raises:
            ValueError: they do not fit the step's sampling rows or the vocabulary; on a GPU they
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
        return cls(
            num_sampling=num_sampling,
            rows=torch.from_numpy(rows.copy()),
            bits=torch.from_numpy(bits.copy()),
        )

    def apply(self, logits: Tensor, *, in_place: bool = False) -> Tensor:
        """Returns the logits [S, V] as float32, -inf where a row may not choose a token.

        Args:
            logits: [S, V]; or [S * n, V] where each row has n - 1 drafts, of which one with a
                grammar has none: then its first.
            in_place: whether contiguous float32 logits may be overwritten.
        """
        masked = logits.to(torch.float32, copy=not in_place).contiguous()
        rows = self.rows * (len(masked) // self.num_sampling)
        mask_tokens(masked, _on(rows, masked), _on(self.bits, masked))
        return masked


def _on(host: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor of the host on another's device, through pinned memory; nobody waits."""
    if like.device.type == "cpu":
        return host
    return host.pin_memory().to(like.device, non_blocking=True)
