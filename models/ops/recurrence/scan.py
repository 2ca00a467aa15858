"""Runs a rule over the tokens of a step and keeps the states: PyTorch on a CPU."""

from collections.abc import Callable, Sequence

import torch

from models.ops.recurrence.request_runs import RequestRun
from models.state_cache import StateCacheData, read_recurrent, write_recurrent

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Maps a state and inputs to the state after them and their outputs."""


def scan(
    inputs: Sequence[torch.Tensor],
    cache: StateCacheData,
    run: RequestRun,
    *,
    step: Rule,
    chunk: Rule,
) -> torch.Tensor:
    """Returns the outputs of a run's tokens, [G, n, H, ...] float32, and keeps their states.

    inputs: of the rule, [G, n, H, ...] float32 each.
    step: of single tokens, whose inputs are [G, H, ...]. chunk: of a request's chunk, [H, C, ...].
    """
    state = read_recurrent(cache, run.pages_after(cache, 0)).float()
    state = state.masked_fill(run.is_first[:, None, None, None], 0)
    if run.computes_steps:
        outputs = []
        for token in range(run.tokens.shape[1]):
            state, output = step(state, *(x[:, token] for x in inputs))
            outputs.append(output)
            if token + 1 in run.kept(cache):
                write_recurrent(cache, run.pages_after(cache, token + 1), state)
        result = torch.stack(outputs, dim=1)
    else:
        outputs, last = [], state[0]
        by_head = [x[0].transpose(0, 1) for x in inputs]
        for tokens in run.chunks():
            last, output = chunk(last, *(x[:, tokens] for x in by_head))
            outputs.append(output)
        write_recurrent(cache, run.pages_after(cache, run.tokens.shape[1]), last.unsqueeze(0))
        result = torch.cat(outputs, dim=1).transpose(0, 1).unsqueeze(0)
    return result
