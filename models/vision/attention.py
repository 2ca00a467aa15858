"""Attention of patches to all patches of their segment: an image, or a window of one."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from models.layers.norm import RMSNorm
from models.layers.rotary_heads import reorder_heads
from models.layers.weight import Replicated, ShardId
from models.ops.attention.segment_attention import segment_attention
from models.ops.elementwise.turn_heads import turn_heads


def uniform_bounds(num_rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Returns the bounds of segments of one length, [num_rows, 2] int32."""
    starts = torch.arange(num_rows, dtype=torch.int32, device=device) // length * length
    return torch.stack((starts, starts + length), dim=1)


def patch_rotation(
    coordinates: torch.Tensor, *, head_dim: int, theta: float, alternates: bool = False
) -> torch.Tensor:
    """Returns the rotation of heads by the row and column of each patch.

    Half of a head's pairs turn by the row, the others by the column.

    Args:
        coordinates: [2, N], each patch's row and column.
        head_dim: elements of a head.
        theta: of the frequencies.
        alternates: whether rows take the even of a head's frequencies and columns the odd ones,
            not both the even ones.

    Returns:
        [N, 2, head_dim] float32, cosines and sines.

    Source: Wang et al. 2024, "Qwen2-VL", section 2.1 (2D-RoPE).
    """
    exponents = torch.arange(0, head_dim, 2, device=coordinates.device).float() / head_dim
    frequencies = 1.0 / theta**exponents
    of_columns = frequencies[1::2] if alternates else frequencies[::2]
    each = zip(coordinates, (frequencies[::2], of_columns), strict=True)
    angles = torch.cat([at.unsqueeze(1) * own for at, own in each], dim=-1).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def halves_rotation(coordinates: torch.Tensor, *, head_dim: int, theta: float) -> torch.Tensor:
    """Returns the rotation of the two halves of a head, each by a coordinate of its own.

    Args:
        coordinates: [2, N], by which the first and the second half turn.
        head_dim: elements of a head.
        theta: of the frequencies.

    Returns:
        [N, 2, head_dim] float32, cosines and sines.

    Source: transformers 5.24, models/gemma4, apply_multidimensional_rope.
    """
    exponents = torch.arange(0, head_dim // 2, 2, device=coordinates.device).float()
    frequencies = 1.0 / theta ** (exponents / (head_dim // 2))
    angles = coordinates.t().unsqueeze(2) * frequencies  # [N, 2, D / 4]
    angles = angles.repeat(1, 1, 2).flatten(1)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def space_rotation(
    coordinates: torch.Tensor, *, head_dim: int, rotary_dim: int, theta: float
) -> torch.Tensor:
    """Returns the rotation of heads by the time, row and column of each patch of an image.

    A third each of the pairs that turn; an image has the time 0. The other pairs come last.

    Args:
        coordinates: [2, N], each patch's row and column.
        head_dim: elements of a head.
        rotary_dim: of these, the ones that turn, a multiple of 6.
        theta: of the frequencies.

    Returns:
        [N, 2, head_dim] float32, cosines and sines.

    Source: transformers 5.24, models/minimax_m3_vl, compute_axial_rope_parameters.
    """
    of_axis = rotary_dim // 3
    exponents = torch.arange(0, of_axis, 2, device=coordinates.device).float() / of_axis
    frequencies = 1.0 / theta**exponents
    turned = (coordinates.unsqueeze(2) * frequencies).unbind()
    angles = torch.cat((torch.zeros_like(turned[0]), *turned), dim=-1)
    angles = functional.pad(angles, (0, (head_dim - rotary_dim) // 2)).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def turn_parts(heads: torch.Tensor, rotation: torch.Tensor, *, num_parts: int) -> torch.Tensor:
    """Rotates heads, [N, H, D], in float32, in parts that turn by themselves."""
    values = heads.float()
    halves = values.chunk(2 * num_parts, dim=-1)
    pairs = zip(halves[::2], halves[1::2], strict=True)
    swapped = torch.cat([x for first, second in pairs for x in (-second, first)], dim=-1)
    cos, sin = rotation.unsqueeze(1).unbind(2)
    return (values * cos + swapped * sin).to(heads.dtype)


def turn_pairs(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates heads, [N, H, D], in float32, each element with its neighbour."""
    values = heads.float()
    swapped = torch.stack((-values[..., 1::2], values[..., ::2]), dim=-1).flatten(2)
    cos, sin = rotation.unsqueeze(1).unbind(2)
    return (values * cos + swapped * sin).to(heads.dtype)


class FusedAttention(nn.Module):
    """Attention whose projections to queries, keys and values are one.

    turns_pairs: whether rotations turn neighbours, not the halves of heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        bias: bool = True,
        out_bias: bool = True,
        turns_pairs: bool = False,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._turn = turn_pairs if turns_pairs else turn_heads
        self._scale = (hidden_size // num_heads) ** -0.5
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        count = self._num_heads
        heads = self.qkv(hidden).unflatten(1, (3 * count, -1))
        q, k = self._turn(heads[:, : 2 * count], rotation).chunk(2, dim=1)
        attended = segment_attention(q, k, heads[:, 2 * count :], bounds, self._scale)
        output: torch.Tensor = self.proj(attended)
        return output


class ReorderedLinear(nn.Linear, Replicated):
    """A projection to heads whose elements are reordered for our rotation while they are loaded."""

    def __init__(self, hidden_size: int, order: Sequence[int], *, bias: bool) -> None:
        super().__init__(hidden_size, hidden_size, bias=bias)
        self._order = order

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies the whole tensor, reordered."""
        super().weight_loader(param, reorder_heads(loaded, self._order), shard_id)


class SplitAttention(nn.Module):
    """Attention with projections of its own to queries, keys and values.

    norm_eps: of norms of queries and keys, all heads together; None without.
    order: of each of our heads' elements, its index in the checkpoint's; None for the same.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        bias: bool,
        out_bias: bool,
        norm_eps: float | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._scale = (hidden_size // num_heads) ** -0.5
        order = order or range(hidden_size // num_heads)
        self.q_proj = ReorderedLinear(hidden_size, order, bias=bias)
        self.k_proj = ReorderedLinear(hidden_size, order, bias=bias)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        if norm_eps is not None:
            self.q_norm = RMSNorm(hidden_size, norm_eps)
            self.k_norm = RMSNorm(hidden_size, norm_eps)
        self._has_norms = norm_eps is not None

    def forward(
        self, hidden: torch.Tensor, bounds: torch.Tensor, rotation: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps [N, hidden] to [N, hidden]."""
        q, k, v = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if self._has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(1, (self._num_heads, -1)) for each in (q, k, v))
        if rotation is not None:
            q, k = turn_heads(q, rotation), turn_heads(k, rotation)
        attended = segment_attention(q, k, v, bounds, self._scale)
        output: torch.Tensor = self.o_proj(attended)
        return output
