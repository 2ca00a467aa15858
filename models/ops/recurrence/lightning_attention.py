"""Linear attention with a decay of each head: octavo::lightning_attention.

The operator has no output, like attention: see models.ops.attention.attention.
"""

import torch
from torch.nn import functional

from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator
from models.ops.recurrence.decayed_attention import decayed_chunk, decayed_step
from models.ops.recurrence.request_runs import request_runs
from models.ops.recurrence.scan import scan
from models.state_cache import StateCacheData


@operator(mutates=("output",))
def lightning_attention(
    qkv: torch.Tensor, slopes: torch.Tensor, output: torch.Tensor, layer_index: int
) -> None:
    """Attends to the state of each request, which sums keys times values.

    Metadata and states come from the forward context. Padding tokens get undefined outputs.
    T tokens, H heads of D elements.

    qkv: [T, 3, H, D]: queries, keys and values, before their silu. slopes: [H] float32; each token
    multiplies a state by e^-slope. output: [T, H, D], contiguous.
    layer_index: of the cache entry.

    Source: see models.ops.recurrence.decayed_attention.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, StateCacheData), f"entry {layer_index} keeps no state"
    if has_kernels(qkv.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.recurrence import (
            decayed_linear_attention as kernel,
        )

        q, k, v = functional.silu(qkv).unbind(1)
        kernel.decayed_linear_attention(q, k, v, slopes, output, cache, metadata, scale=1.0)
        return
    for run in request_runs(metadata):
        q, k, v = functional.silu(qkv[run.tokens]).float().unbind(2)
        decay = -slopes.view(-1, 1).expand(*run.tokens.shape, -1, 1)
        result = scan(
            (q, k, v, decay), cache, run, step=decayed_step, chunk=decayed_chunk,
        )  # fmt: skip
        output[run.tokens] = result.to(output.dtype)
