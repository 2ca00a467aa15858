"""Attention of patches to all patches of their segment: an image, or a window of one."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from models.layers.norm import RMSNorm


class Segments:
    """Runs of patches that attend to each other, grouped by their lengths.

    Each group is computed in one call.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Takes the length of each segment, in the order of the patches."""
        self._one_length = lengths[0] if len(set(lengths)) == 1 else None
        self._groups: list[torch.Tensor] = []
        if self._one_length is not None:
            return
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        for length in sorted(set(lengths)):
            is_own = torch.tensor([each == length for each in lengths])
            index = starts[is_own].unsqueeze(1) + torch.arange(length)
            self._groups.append(index.to(device))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """Maps q, k and v, [N, heads, D], to [N, heads * D].

        scale: factor of the scores; None means 1 / sqrt(D).
        """
        if self._one_length is not None:
            split = [each.view(-1, self._one_length, *each.shape[1:]) for each in (q, k, v)]
            return _attended(*split, scale=scale).flatten(0, 1).flatten(1)
        output = torch.empty_like(q)
        for index in self._groups:
            output[index] = _attended(q[index], k[index], v[index], scale=scale)
        return output.flatten(1)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    """Maps [segments, length, heads, D] to the same."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


class PatchRotation:
    """Rotation of heads by the row and column of each patch.

    Half of a head's pairs turn by the row, the others by the column.
    Source: Wang et al. 2024, "Qwen2-VL", section 2.1 (2D-RoPE).
    """

    def __init__(
        self,
        coordinates: torch.Tensor,
        *,
        head_dim: int,
        theta: float,
        alternates: bool = False,
    ) -> None:
        """Computes the angles.

        Args:
            coordinates: [2, N], each patch's row and column.
            head_dim: elements of a head.
            theta: of the frequencies.
            alternates: whether rows take the even of a head's frequencies and columns the odd ones,
                not both the even ones.
        """
        exponents = torch.arange(0, head_dim, 2, device=coordinates.device).float() / head_dim
        frequencies = 1.0 / theta**exponents
        of_columns = frequencies[1::2] if alternates else frequencies[::2]
        each = zip(coordinates, (frequencies[::2], of_columns), strict=True)
        angles = torch.cat([at.unsqueeze(1) * own for at, own in each], dim=-1)
        self._cos = angles.cos().repeat(1, 2).unsqueeze(1)
        self._sin = angles.sin().repeat(1, 2).unsqueeze(1)

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotates heads, [N, H, D], in float32."""
        values = heads.float()
        first, second = values.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return (values * self._cos + swapped * self._sin).to(heads.dtype)


class HalvesRotation:
    """Rotation of the two halves of a head, each by a coordinate of its own.

    Source: transformers 5.24, models/gemma4, apply_multidimensional_rope.
    """

    def __init__(self, coordinates: torch.Tensor, *, head_dim: int, theta: float) -> None:
        """Takes the coordinates, [2, N], by which the first and the second half turn."""
        exponents = torch.arange(0, head_dim // 2, 2, device=coordinates.device).float()
        frequencies = 1.0 / theta ** (exponents / (head_dim // 2))
        angles = coordinates.t().unsqueeze(2) * frequencies  # [N, 2, D / 4]
        self._cos = angles.cos().repeat(1, 1, 2).unsqueeze(1)
        self._sin = angles.sin().repeat(1, 1, 2).unsqueeze(1)

    def turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotates heads, [N, H, D], in float32."""
        values = heads.float().view(*heads.shape[:2], 2, -1)
        first, second = values.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return (values * self._cos + swapped * self._sin).flatten(2).to(heads.dtype)


class FusedAttention(nn.Module):
    """Attention whose projections to queries, keys and values are one."""

    def __init__(
        self, hidden_size: int, num_heads: int, *, bias: bool = True, out_bias: bool = True
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)

    def forward(
        self, hidden: torch.Tensor, rotation: PatchRotation, segments: Segments
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        heads = self.qkv(hidden).view(len(hidden), 3, self._num_heads, -1)
        q, k, v = heads.unbind(1)
        attended = segments.attend(rotation.turn(q), rotation.turn(k), v)
        output: torch.Tensor = self.proj(attended)
        return output


class SplitAttention(nn.Module):
    """Attention with projections of its own to queries, keys and values.

    norm_eps: of norms of queries and keys, all heads together; None without.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        bias: bool,
        out_bias: bool,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        if norm_eps is not None:
            self.q_norm = RMSNorm(hidden_size, norm_eps)
            self.k_norm = RMSNorm(hidden_size, norm_eps)
        self._has_norms = norm_eps is not None

    def forward(
        self, hidden: torch.Tensor, segments: Segments, rotation: PatchRotation | None = None
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if self._has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.view(len(hidden), self._num_heads, -1) for each in (q, k, v))
        if rotation is not None:
            q, k = rotation.turn(q), rotation.turn(k)
        output: torch.Tensor = self.o_proj(segments.attend(q, k, v))
        return output
