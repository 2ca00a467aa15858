"""How the two kernels of adapters divide a step into tiles; see add_adapters."""

from dataclasses import dataclass

import triton
import triton.language as tl

from models.batch_invariance import is_batch_invariant
from models.kernels.launching.launch import Launch

SMALLEST_DOT = 16
"""Least rows and columns of a tile that tensor cores multiply."""
_MOST_SPLIT_TOKENS = 512
"""Steps of up to this many tokens have several lanes, and split the inputs."""
_LANES = 16


@triton.jit
def find_firsts(slots):
    """Returns which tokens are the first ones of their slots, and have an adapter."""
    each = tl.arange(0, slots.shape[0])
    is_earlier = each[None, :] < each[:, None]
    is_repeat = is_earlier & (slots[None, :] == slots[:, None])
    return (tl.max(is_repeat.to(tl.int32), axis=1) == 0) & (slots > 0)


def inner_columns(num_inner: int) -> int:
    """Returns how many of A's rows a program computes, of experts and of long steps."""
    columns: int = max(SMALLEST_DOT, min(64, triton.next_power_of_2(num_inner)))
    return columns


def rank_columns(rank: int) -> int:
    """Returns the columns of a tile of B."""
    columns: int = max(SMALLEST_DOT, triton.next_power_of_2(rank))
    return columns


def most_rows(rank: int) -> int:
    """Returns the most tokens of a tile that is multiplied with B.

    Large ranks would need more shared memory and registers than a program has.
    """
    return 64 if rank < 128 else 32


@dataclass(frozen=True, slots=True)
class AdapterTiling:
    """How a step is divided, by its tokens.

    shrunk, expanded: tokens of a tile of each kernel. lanes: of a tile of the first one. is_split:
    whether several programs share the inputs. is_apart: whether the second one multiplies with one
    adapter at a time.
    """

    shrunk: int
    expanded: int
    lanes: int
    is_split: bool
    is_apart: bool


def tiling_of(num_tokens: int) -> AdapterTiling:
    """Returns the tiling of a step.

    In batch-invariant mode only the lanes differ, which change no sum.
    """
    has_many = num_tokens > _MOST_SPLIT_TOKENS
    if is_batch_invariant():
        return AdapterTiling(32, 32, 1 if has_many else _LANES, is_split=True, is_apart=True)
    # Prompts have few adapters in a tile.
    if has_many:
        return AdapterTiling(64, 64, 1, is_split=False, is_apart=True)
    if num_tokens <= SMALLEST_DOT:
        tokens = SMALLEST_DOT, SMALLEST_DOT
        return AdapterTiling(*tokens, _LANES, is_split=True, is_apart=num_tokens == 1)
    expanded = 32 if num_tokens <= 64 else 64
    return AdapterTiling(32, expanded, _LANES, is_split=True, is_apart=False)


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """A kernel for layers of some sizes, with its tiles."""

    launch: Launch
    tokens: int
    lanes: int
    tiles: int
    splits: int

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Returns the programs of a step."""
        lanes = min(self.lanes, num_tokens)
        return triton.cdiv(num_tokens, self.tokens) * lanes, self.tiles, self.splits
