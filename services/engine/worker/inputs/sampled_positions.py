"""Positions of a step's drafts and sampled tokens in their rows, computed on the device.

The host may order a step before it knows how many tokens the last one brought, so it does not know
these positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.spec_decode.verification import NO_DRAFT
from services.engine.worker.inputs.input_buffers import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPositions:
    """The tokens that S requests with at most k drafts sample.

    row_ids, positions: [S, k + 1] int32. A request with fewer drafts repeats its last position.
    is_draft: [S, k], whether a draft is there.
    """

    row_ids: Tensor
    positions: Tensor
    is_draft: Tensor

    @classmethod
    def of(cls, header: Header, columns: Tensor) -> "SampledPositions":
        """Returns those of a step whose header is on the device.

        columns: 0 to k, [k + 1] int32.
        """
        row_ids, seq_lens, num_drafts = header.row_ids, header.seq_lens, header.num_drafts
        if len(header.sample_indices) < len(row_ids):
            row_ids, seq_lens, num_drafts = (
                each.index_select(0, header.sample_indices)
                for each in (row_ids, seq_lens, num_drafts)
            )
        num_drafts = num_drafts[:, None]
        # Counted from the end, which requests with fewer drafts repeat.
        from_end = torch.clamp(columns - num_drafts, max=0)
        return cls(
            row_ids=row_ids[:, None].expand(-1, len(columns)),
            positions=seq_lens[:, None] + from_end,
            is_draft=from_end[:, :-1] < 0,
        )

    def drafts(self, tokens: Tensor) -> Tensor:
        """Returns the drafts from the table of tokens, [S, k] int32, padded with NO_DRAFT."""
        drafts = tokens[self.row_ids[:, :-1], self.positions[:, :-1]]
        return torch.where(self.is_draft, drafts, NO_DRAFT)

    def known_lengths(self, num_accepted: Tensor) -> Tensor:
        """Returns the tokens of each row after verification, [S] int32.

        num_accepted: [S], drafts that hold.
        """
        return self.positions[:, 0] + num_accepted.int() + 1
