"""Gives the networks of transformers our attention."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from models.layers.attention import Attention
from models.transformers_backend.attention_calls import AttentionCall

PAGED = "octavo"
"""Name of our attention in transformers' table."""

_CHILD = "octavo_attention"


class PagedAttention(Attention):
    """Attention of one layer, called as transformers' networks call theirs."""

    def __init__(self, layer_index: int, call: AttentionCall) -> None:
        super().__init__(
            layer_index,
            sliding_window=call.sliding_window,
            scale=call.scaling,
            soft_cap=call.soft_cap,
        )
        self._call = call

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Maps query [1, Hq, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv] to [1, T, Hq, Dv].

        sinks: [Hq], a score of each head without a key.
        """
        q, k, v = (self._padded(x.squeeze(0).transpose(0, 1)) for x in (query, key, value))
        output: Tensor = self(q, k, v, sinks=sinks).view(q.shape)
        return output[..., : self._call.value_dim].unsqueeze(0)

    def _padded(self, heads: Tensor) -> Tensor:
        """Returns [T, H, D] heads, contiguous and as long as cached ones."""
        missing = self._call.cached_dim - heads.shape[-1]
        return functional.pad(heads, (0, missing)) if missing else heads.contiguous()


def install(module: nn.Module, attention: PagedAttention) -> None:
    """Makes a module of a network attend with `attention`."""
    module.add_module(_CHILD, attention)


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attends with the module's `PagedAttention`; see its `attend` for shapes.

    Options were examined by `attention_calls.record_call` and are the same at every call.
    """
    del attention_mask, options
    attention: PagedAttention = getattr(module, _CHILD)
    return attention.attend(query, key, value, s_aux), None
