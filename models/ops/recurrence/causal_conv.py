"""Reference of the short causal convolution of each channel, whose last inputs a cache keeps."""

import torch
from torch.nn import functional

from models.ops.recurrence.request_runs import RequestRun
from models.state_cache import StateCacheData, read_conv, write_conv


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: StateCacheData,
    run: RequestRun,
    *,
    activates: bool,
) -> torch.Tensor:
    """Returns the outputs of a run's tokens, [G, n, C] float32, and keeps their last inputs.

    x: [T, C], of the step. weight: [C, W], the last column for the token itself. bias: [C].
    activates: whether a silu follows.
    """
    kept = read_conv(cache, run.pages_after(cache, 0))
    kept = kept.masked_fill(run.is_first[:, None, None], 0)
    inputs = torch.cat((kept, x[run.tokens].to(kept.dtype)), dim=1)
    width, num_tokens = weight.shape[1], run.tokens.shape[1]
    for end in run.kept(cache):
        write_conv(cache, run.pages_after(cache, end), inputs[:, end : end + width - 1])
    output = torch.zeros(len(inputs), num_tokens, len(weight), dtype=torch.float32, device=x.device)
    # One tap after another: the sum of a token does not depend on those beside it.
    for tap in range(width):
        output += inputs[:, tap : tap + num_tokens].float() * weight[:, tap].float()
    if bias is not None:
        output += bias.float()
    return functional.silu(output) if activates else output
