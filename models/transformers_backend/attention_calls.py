"""Observes how a network of transformers attends, in a pass over tensors without memory.

The network calls `record_call` in place of attention, and `describe_mask` in place of masks. A
description of a mask travels through the network as an attribute of a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RECORDING = "octavo_recording"
"""Name of both functions in transformers' tables."""

_CALLS = "octavo_attention_calls"
_DESCRIPTION = "octavo_mask"
_FAR = 2**24
"""Positions at which masks are examined; windows are shorter."""

_WITHOUT_EFFECT = frozenset(
    {"cache_position", "dropout", "head_mask", "layer_idx", "position_embeddings", "position_ids"}
)
"""Options of attention that change nothing without a cache, padding and training.

A head mask is None in generation; `record_call` refuses any other.
"""


class UnsupportedAttentionError(ValueError):
    """A network attends in a way that our operator does not compute; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """How one layer attends.

    value_dim: size of a head of values; head_dim: of queries and keys.
    scaling: factor of the scores.
    sliding_window: keys that a query sees, its own included; None means all.
    soft_cap: of the scores; 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    sliding_window: int | None
    soft_cap: float

    @property
    def cached_dim(self) -> int:
        """Size of a cached key and value, the shorter of which is padded with zeros."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class _Mask:
    """is_causal: whether a query sees the last keys up to its own, and no others."""

    sliding_window: int | None
    is_causal: bool


def record_call(  # noqa: PLR0913  # transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Notes a call of attention at its module; returns an output of the right shape.

    Maps query [1, Hq, T, D], key [1, Hk, T, D] and value [1, Hk, T, Dv] to [1, T, Hq, Dv].

    Raises:
        UnsupportedAttentionError: our operator does not compute this attention.
    """
    del s_aux  # honoured
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttentionError("attends to later tokens")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError("attends to other tokens than those of its input")
    for name, option in options.items():
        has_effect = option is not None and option is not False
        if has_effect and (name not in _WITHOUT_EFFECT or name == "head_mask"):
            raise UnsupportedAttentionError(f"gives attention the option {name}")
    if attention_mask is not None:
        mask = getattr(attention_mask, _DESCRIPTION, None)
        if not isinstance(mask, _Mask):
            raise UnsupportedAttentionError("makes its own attention mask")
        if not mask.is_causal:
            raise UnsupportedAttentionError("needs a mask that is no sliding window")
        # The mask is what decides; a window is a hint for kernels that take none.
        sliding_window = mask.sliding_window
    _, num_heads, num_tokens, head_dim = query.shape
    call = AttentionCall(
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        value_dim=value.shape[3],
        scaling=head_dim**-0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        soft_cap=float(softcap or 0.0),
    )
    vars(module).setdefault(_CALLS, []).append(call)
    return value.new_empty(1, num_tokens, num_heads, value.shape[3]), None


def take_calls(network: nn.Module) -> dict[str, list[AttentionCall]]:
    """Returns the calls of the modules that attended, by path in the network's order."""
    return {
        path: vars(module)[_CALLS]
        for path, module in network.named_modules()
        if _CALLS in vars(module)
    }


def describe_mask(*args: Any, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
    """Returns a tensor that describes the mask which transformers wants.

    mask_function says whether a query sees a key: (batch, head, query, key) indices -> bool.
    """
    del args, options

    def sees(query: int, key: int) -> bool:
        batch, head, at, seen = (torch.tensor(index, device="cpu") for index in (0, 0, query, key))
        return bool(mask_function(batch, head, at, seen))

    mask = torch.empty(1, 1, 1, 1, device="meta")
    windows = {_window(sees, position) for position in (_FAR, _FAR + 7, 2 * _FAR - 1)}
    is_causal = len(windows) == 1 and sees(_FAR, _FAR) and not sees(_FAR, _FAR + 1)
    setattr(mask, _DESCRIPTION, _Mask(windows.pop(), is_causal))
    return mask


def _window(sees: Callable[[int, int], bool], query: int) -> int | None:
    """Returns how many keys a query sees up to its own; None if it sees the first one."""
    if sees(query, 0):
        return None
    unseen, seen = 0, query
    while seen - unseen > 1:
        middle = (seen + unseen) // 2
        if sees(query, middle):
            seen = middle
        else:
            unseen = middle
    return query - seen + 1
