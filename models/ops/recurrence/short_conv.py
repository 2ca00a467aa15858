"""Short convolution without a recurrent state: octavo::short_conv.

The operator has no output, like attention: see models.ops.attention.attention.
"""

import torch

from models.forward_context import get_forward_context
from models.kernels.gpu import has_kernels
from models.ops.custom_op import operator
from models.ops.recurrence.causal_conv import causal_conv
from models.ops.recurrence.request_runs import request_runs
from models.state_cache import StateCacheData


@operator(mutates=("output",))
def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    layer_index: int,
) -> None:
    """Convolves each channel with the inputs before it.

    Metadata and kept inputs come from the forward context. Padding tokens get undefined outputs.

    x: [T, C]; rows may be apart. weight: [C, W]. bias: [C] or None. output: [T, C], contiguous.
    layer_index: of the cache entry.

    Source: Liquid AI 2025, "LFM2 Technical Report", section 2.
    """
    context = get_forward_context()
    cache, metadata = context.kv_cache_data[layer_index], context.metadata_of(layer_index)
    assert isinstance(cache, StateCacheData), f"entry {layer_index} keeps no state"
    if has_kernels(x.device):
        # Imported on first use: a CPU installation has no Triton.
        from models.kernels.recurrence import (
            causal_conv as kernel,
        )

        kernel.causal_conv(x, weight, bias, output, cache, metadata, activates=False)
        return
    for run in request_runs(metadata):
        result = causal_conv(x, weight, bias, cache, run, activates=False)
        output[run.tokens] = result.to(output.dtype)
