"""The recurrent state and the last inputs of a convolution that a layer keeps of each request.

A state is as large as keys and values of hundreds of tokens, and lives among their blocks: in any
blocks of the pool, which a request's pages name in order. Layers that share memory, such as an
attention layer and a state layer of another group, see the same bytes: a block of the former is a
page of the latter.

The memory of a layer is [G, N, U] bytes: G regions (keys and values, or one) of N blocks. A state
takes units of U bytes, unit u in region u % G of page u // G. Units have whole rows of the
recurrent state, [heads * rows, columns]; then whole elements of the convolution's inputs, [width -
1, channels], oldest first, which begin in a unit of their own.

With drafts a request has several states, slots: the one after n tokens is in slot n modulo their
number. A step writes the state after each of its tokens, and the next one begins at the slot of its
first position: the state after the accepted drafts, whatever their number. Steps of more tokens
than slots have no drafts; they keep their last state alone.

Block 0 belongs to no request. One whose first page it is, a dummy, has no state: it starts from
zeros, and nothing of it is kept, as the block's content must stay finite for attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Elements that blocks are copied in; the widest that fits: each thread moves one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Sizes of the state that a layer keeps of a request, on one rank.

    num_heads, head_rows, head_columns: sizes of the recurrent state, [heads, rows, columns]; no
        heads: none. dtype: its.
    conv_channels, conv_width: channels of a causal convolution, and the inputs that each output
        sees, its own included. conv_dtype: of its inputs.
    """

    num_heads: int = 0
    head_rows: int = 0
    head_columns: int = 0
    dtype: torch.dtype = torch.float32
    conv_channels: int = 0
    conv_width: int = 1
    conv_dtype: torch.dtype = torch.float32

    @property
    def num_rows(self) -> int:
        """Rows of the recurrent state of all heads."""
        return self.num_heads * self.head_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the recurrent state."""
        return self.head_columns * self.dtype.itemsize

    @property
    def num_conv_elements(self) -> int:
        """Kept inputs of the convolution."""
        return self.conv_channels * (self.conv_width - 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        conv_bytes = self.num_conv_elements * self.conv_dtype.itemsize
        return self.num_rows * self.row_bytes + conv_bytes

    def num_row_units(self, unit_bytes: int) -> int:
        """Returns the units that the recurrent state takes.

        Raises:
            ValueError: a unit has no room for a row.
        """
        if not self.num_rows:
            return 0
        if unit_bytes < self.row_bytes:
            raise ValueError(
                f"a block of {unit_bytes} bytes has no room for a row of a state, which has "
                f"{self.row_bytes}; a larger --block-size makes blocks larger"
            )
        return -(-self.num_rows // (unit_bytes // self.row_bytes))

    def num_pages(self, num_regions: int, unit_bytes: int) -> int:
        """Returns the blocks that a state takes; raises ValueError as `num_row_units` does."""
        return -(-self.num_units(unit_bytes) // num_regions)

    def num_units(self, unit_bytes: int) -> int:
        """Returns the units that a state takes; raises ValueError as `num_row_units` does."""
        elements_per_unit = unit_bytes // self.conv_dtype.itemsize
        return self.num_row_units(unit_bytes) - (-self.num_conv_elements // elements_per_unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCacheData:
    """One layer's states.

    memory: [G, N blocks, U] uint8, contiguous; layers of other groups may see the same bytes.
    num_slots: states of a request, at most its tokens in a step with drafts.
    """

    memory: torch.Tensor
    spec: StateSpec
    num_slots: int = 1

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
        return self.memory.shape[1]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one region of a block."""
        return self.memory.shape[2]

    @property
    def rows_per_unit(self) -> int:
        """Rows of the recurrent state in a unit."""
        return self.unit_bytes // max(1, self.spec.row_bytes)

    @property
    def conv_per_unit(self) -> int:
        """Inputs of the convolution in a unit."""
        return self.unit_bytes // self.spec.conv_dtype.itemsize

    @property
    def first_conv_unit(self) -> int:
        """The unit in which the convolution's inputs begin."""
        return self.spec.num_row_units(self.unit_bytes)

    @property
    def num_pages(self) -> int:
        """Blocks that a state takes."""
        return self.spec.num_pages(self.memory.shape[0], self.unit_bytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by name, each [N, ...]."""
        return {f"state{region}": memory for region, memory in enumerate(self.memory)}


def pages_after(
    cache: StateCacheData, pages: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Returns the pages of R requests' states after as many tokens: [R, P].

    pages: [R, slots * P]. positions: [R] int64.
    """
    if cache.num_slots == 1:
        return pages
    requests = torch.arange(len(pages), device=pages.device)
    return pages.reshape(len(pages), cache.num_slots, -1)[requests, positions % cache.num_slots]


def has_state(pages: torch.Tensor) -> torch.Tensor:
    """Returns which of R requests with [R, P] pages have a state: [R] bool."""
    return pages[:, 0] != 0


def read_recurrent(cache: StateCacheData, pages: torch.Tensor) -> torch.Tensor:
    """Returns the recurrent states of R requests with [R, P] pages: [R, heads, rows, columns].

    Zeros of a request without a state.
    """
    spec, rows = cache.spec, cache.rows_per_unit
    units = _units(cache, pages)[:, : cache.first_conv_unit, : rows * spec.row_bytes]
    shape = (len(pages), cache.first_conv_unit * rows, spec.head_columns)
    values = units.contiguous().view(spec.dtype).view(shape)[:, : spec.num_rows]
    states = values.view(len(pages), spec.num_heads, spec.head_rows, spec.head_columns)
    return states.masked_fill(~has_state(pages)[:, None, None, None], 0)


def write_recurrent(cache: StateCacheData, pages: torch.Tensor, values: torch.Tensor) -> None:
    """Stores recurrent states, [R, heads, rows, columns], of R requests with [R, P] pages."""
    spec, rows = cache.spec, cache.rows_per_unit
    num_units = cache.first_conv_unit
    is_kept = has_state(pages)
    pages, values = pages[is_kept], values[is_kept]
    padded = values.new_zeros((len(pages), num_units * rows, spec.head_columns), dtype=spec.dtype)
    padded[:, : spec.num_rows] = values.flatten(1, 2)
    data = padded.view(torch.uint8).view(len(pages), num_units, rows * spec.row_bytes)
    _write_units(cache, pages, data, first=0)


def read_conv(cache: StateCacheData, pages: torch.Tensor) -> torch.Tensor:
    """Returns the last inputs of R requests with [R, P] pages: [R, width - 1, channels].

    Zeros of a request without a state.
    """
    spec = cache.spec
    used = cache.conv_per_unit * spec.conv_dtype.itemsize
    units = _units(cache, pages)[:, cache.first_conv_unit :, :used].contiguous()
    values = units.view(spec.conv_dtype).flatten(1)[:, : spec.num_conv_elements]
    inputs = values.view(len(pages), spec.conv_width - 1, spec.conv_channels)
    return inputs.masked_fill(~has_state(pages)[:, None, None], 0)


def write_conv(cache: StateCacheData, pages: torch.Tensor, values: torch.Tensor) -> None:
    """Stores the last inputs, [R, width - 1, channels], of R requests with [R, P] pages."""
    spec, size = cache.spec, cache.conv_per_unit
    num_units = -(-spec.num_conv_elements // size)
    is_kept = has_state(pages)
    pages, values = pages[is_kept], values[is_kept]
    padded = values.new_zeros((len(pages), num_units * size), dtype=spec.conv_dtype)
    padded[:, : spec.num_conv_elements] = values.flatten(1)
    data = padded.view(torch.uint8).view(len(pages), num_units, size * spec.conv_dtype.itemsize)
    _write_units(cache, pages, data, first=cache.first_conv_unit)


def copy_blocks(memory: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
    """Copies blocks of states: [2, n] int32 or int64, from and to.

    All of one memory are read before any is written.

    Args:
        memory: [G, N blocks, U] each.
        blocks: on its device.
    """
    from_, to = blocks.long()
    for each in memory:
        word = next(word for word in _WORDS if each.shape[2] % word.itemsize == 0)
        words = each.view(word)
        words[:, to] = words[:, from_]


def _units(cache: StateCacheData, pages: torch.Tensor) -> torch.Tensor:
    """Returns all units of R requests: [R, units, U] bytes."""
    gathered = cache.memory[:, pages.long()[:, : cache.num_pages]]
    return gathered.permute(1, 2, 0, 3).flatten(1, 2)


def _write_units(
    cache: StateCacheData, pages: torch.Tensor, data: torch.Tensor, *, first: int
) -> None:
    """Writes the beginning of units from `first` on: data [R, units, bytes]."""
    regions = len(cache.memory)
    units = torch.arange(first, first + data.shape[1], device=pages.device)
    blocks = pages.long()[:, units // regions]
    cache.memory[(units % regions).expand_as(blocks), blocks, : data.shape[2]] = data
