"""How the two kernels of adapters divide a step into tiles; see add_adapters."""

from dataclasses import dataclass

import triton
import triton.language as tl

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


@dataclass(frozen=True, slots=True)
class AdapterTiling:
    """How a step is divided, by its tokens.

    shrunk, expanded: tokens of a tile of each kernel. lanes: of a tile of the first one. is_split:
    whether several programs share the inputs. is_single: whether there is one token.
    """

    shrunk: int
    expanded: int
    lanes: int
    is_split: bool
    is_single: bool = False


def tiling_of(num_tokens: int) -> AdapterTiling:
    """Returns the tiling of a step."""
    if num_tokens > _MOST_SPLIT_TOKENS:
        return AdapterTiling(64, 64, 1, is_split=False)
    if num_tokens <= SMALLEST_DOT:
        return AdapterTiling(SMALLEST_DOT, SMALLEST_DOT, _LANES, True, num_tokens == 1)
    return AdapterTiling(32, 32 if num_tokens <= 64 else 64, _LANES, is_split=True)


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
