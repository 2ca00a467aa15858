"""Compressed keys: each is made of the projections of several neighbouring tokens.

Source: DeepSeek-AI 2026, "DeepSeek-V4", sections 2.3.1 and 2.3.2; transformers 5.24,
models/deepseek_v4.
"""

from dataclasses import replace

import torch

from models.operands.entry_maker import EntryMaker
from models.operands.row_pages import RowPages
from models.ops.elementwise.pair_rotation import turn_pairs


def made_entries(
    maker: EntryMaker, tokens: RowPages, requests: torch.Tensor, numbers: torch.Tensor
) -> torch.Tensor:
    """Returns entries by request and number, both [m]: [m, D].

    tokens: rows with values and gates.
    """
    rate, size, end = maker.rate, maker.size, maker.begin + 2 * maker.width
    tokens = replace(tokens, rows=tokens.rows[..., maker.begin : end])
    first = -rate if maker.overlaps else 0
    places = torch.arange(first, rate, device=numbers.device)
    positions = numbers.unsqueeze(1) * rate + places
    values, gates = tokens.of(requests.unsqueeze(1), positions).chunk(2, dim=-1)
    gates = gates.float() + maker.position_bias[places % rate]
    if maker.overlaps:
        values, gates = (_own_halves(each, rate, size) for each in (values, gates))
        gates = gates.masked_fill((positions < 0).unsqueeze(-1), -torch.inf)
    entries = (values * gates.softmax(1).to(values.dtype)).sum(1)
    return _turned(maker, _normed(maker, entries), numbers * rate)


def _normed(maker: EntryMaker, entries: torch.Tensor) -> torch.Tensor:
    exact = entries.float()
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + maker.eps)
    return (exact * scale * maker.norm_weight.float()).to(entries.dtype)


def _turned(maker: EntryMaker, entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = positions.unsqueeze(1).float() * maker.frequencies
    cos, sin = angles.cos() * maker.table_scale, angles.sin() * maker.table_scale
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
