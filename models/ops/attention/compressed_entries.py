"""Compressed keys: each is made of the projections of several neighbouring tokens.

Source: DeepSeek-AI 2026, "DeepSeek-V4", sections 2.3.1 and 2.3.2; transformers 5.24,
models/deepseek_v4.
"""

from dataclasses import dataclass

import torch

from models.operands.row_pages import RowPages
from models.ops.elementwise.pair_rotation import turn_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """How tokens become an entry. D elements of an entry, P rotated ones.

    A token gives a value and a gate of W * D elements, W being 2 if entries overlap, else 1. An
    entry is the sum over its tokens of values, weighted for each element by the softmax of gates.
    With overlap it also has the tokens of the entry before: they give the first D elements, its
    own tokens the last.

    position_bias: [rate, W * D] float32, added to the gates by place in the entry.
    norm_weight: [D], of the norm with `eps` after the sum.
    frequencies: [P / 2] float32, angle of each pair per position; table_scale: of sine and cosine.
    """

    rate: int
    overlaps: bool
    position_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    frequencies: torch.Tensor
    table_scale: float

    def entries(
        self, tokens: RowPages, requests: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Returns entries by request and number, both [m]: [m, D].

        tokens: values and gates of each token, rows of [2 * W * D].
        """
        rate, size = self.rate, self.norm_weight.shape[0]
        first = -rate if self.overlaps else 0
        places = torch.arange(first, rate, device=numbers.device)
        positions = numbers.unsqueeze(1) * rate + places
        values, gates = tokens.of(requests.unsqueeze(1), positions).chunk(2, dim=-1)
        gates = gates.float() + self.position_bias[places % rate]
        if self.overlaps:
            values, gates = (_own_halves(each, rate, size) for each in (values, gates))
            gates = gates.masked_fill((positions < 0).unsqueeze(-1), -torch.inf)
        entries = (values * gates.softmax(1).to(values.dtype)).sum(1)
        return self._turned(self._normed(entries), numbers * rate)

    def _normed(self, entries: torch.Tensor) -> torch.Tensor:
        exact = entries.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (exact * scale * self.norm_weight.float()).to(entries.dtype)

    def _turned(self, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.unsqueeze(1).float() * self.frequencies
        cos, sin = angles.cos() * self.table_scale, angles.sin() * self.table_scale
        return turn_pairs(entries, cos.to(entries.dtype), sin.to(entries.dtype))


def _own_halves(x: torch.Tensor, rate: int, size: int) -> torch.Tensor:
    """Returns the first elements of earlier tokens and the last of others, [m, 2 * rate, D]."""
    return torch.cat((x[:, :rate, :size], x[:, rate:, size:]), dim=1)


def completed_entries(
    query_start_loc: torch.Tensor, positions: torch.Tensor, rate: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the entries whose last token is in a step, without reading anything on the host.

    query_start_loc: [R + 1], where each request's query tokens start. positions: [T].

    Returns:
        Request, number in its sequence, and whether there is one, each [T // rate + R].
    """
    num_tokens, num_requests = len(positions), len(query_start_loc) - 1
    starts = positions[query_start_loc[:-1].clamp(max=num_tokens - 1).long()]
    firsts = starts.div(rate, rounding_mode="floor")
    ends = (starts + query_start_loc.diff()).div(rate, rounding_mode="floor")
    counts = ends - firsts
    totals = counts.cumsum(0)
    places = torch.arange(num_tokens // rate + num_requests, device=positions.device)
    requests = torch.searchsorted(totals, places, right=True).clamp(max=num_requests - 1)
    numbers = firsts[requests] + places - (totals - counts)[requests]
    return requests, numbers, places < totals[-1]
