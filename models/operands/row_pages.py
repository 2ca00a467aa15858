"""Where the rows of a step's sequences are in a paged cache."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPages:
    """Addresses of rows, each of which is in the block of its last token.

    R requests, N blocks, n rows of a block, C elements of a row.

    rows: [N, n, C], of the cache. rate: tokens of a row. block_tokens: of a block.
    block_tables: [R, max_blocks] int32; entry i is the block of tokens from i * table_tokens on.
    """

    rows: torch.Tensor
    rate: int
    block_tokens: int
    block_tables: torch.Tensor
    table_tokens: int

    def of(self, requests: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Returns rows by request and number within its sequence, [..., C].

        Both are integers of shapes that broadcast. Numbers before the first give the first, those
        past the table give some row.
        """
        block_ids, offsets = self._addresses(requests, numbers)
        return self.rows[block_ids, offsets]

    def write(
        self, requests: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor, are: torch.Tensor
    ) -> None:
        """Writes rows, [m, C], by request and number, [m], where `are`, [m] bool, is true.

        The null block keeps its content, so that steps of dummy requests repeat their results.
        """
        block_ids, offsets = self._addresses(requests, numbers)
        are = are & (block_ids != 0)
        block_ids, offsets = block_ids * are, offsets * are
        kept = self.rows[block_ids, offsets]
        self.rows[block_ids, offsets] = torch.where(are.unsqueeze(-1), rows.to(kept.dtype), kept)

    @property
    def num_rows(self) -> int:
        """The most rows of a sequence that has all blocks of the table."""
        return self.block_tables.shape[1] * self.table_tokens // self.rate

    def _addresses(
        self, requests: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block of each row, and its place there."""
        lasts = (numbers.clamp(min=0) + 1) * self.rate - 1
        entries = lasts.div(self.table_tokens, rounding_mode="floor")
        entries = entries.clamp(max=self.block_tables.shape[1] - 1)
        block_ids = self.block_tables[requests, entries].long()
        offsets = (lasts % self.block_tokens).div(self.rate, rounding_mode="floor")
        return block_ids, offsets
