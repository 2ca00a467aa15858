"""Verifies draft tokens, and trims a step's result to the accepted ones.

The token after each draft is sampled as without drafts: from the distribution that follows the
drafts before it, with the random number of its position. A draft is accepted if it equals the token
sampled at its position. The first rejected draft ends the row; the token sampled there is kept.

This is rejection sampling for drafts whose distribution is one on one token. Such a draft d must be
accepted with probability p(d), and the token x drawn from p equals d that often; otherwise the
token must follow p without d, and x does. So p is kept exactly, and the tokens are those of a run
without drafts, as the random number belongs to the position.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", section
2.3.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.engine.batch import (
    StepResult,
    pack_float32,
    pack_int32,
    read_float32,
    read_int32,
)

NO_DRAFT = -2
"""Pads requests that have fewer drafts than others; no sampled token equals it."""


def count_accepted(sampled: Tensor, drafts: Tensor) -> Tensor:
    """Returns how many leading drafts of each of S rows hold, [S] int64.

    Args:
        sampled: [S, k + 1], the tokens sampled before each draft and after the last one.
        drafts: [S, k], padded with NO_DRAFT.
    """
    return (sampled[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The verification of S rows' drafts, and their next drafts.

    sampled: [S * (k + 1)] int32, the tokens that the drafts were compared with.
    num_accepted: [S] int32. token_ids: [S, k] int32, the next drafts, filled up with NO_DRAFT.
    token_ids is [S, 0] if the scheduler makes the drafts.
    hidden: [S, hidden] of each next draft, by which the drafts were chosen; empty if S is 0.
    by_graph: a graph computed this; the next replay overwrites it.
    """

    sampled: Tensor
    num_accepted: Tensor
    token_ids: Tensor
    hidden: tuple[Tensor, ...] = ()
    by_graph: bool = False

    def trim(self, result: StepResult) -> None:
        """Keeps in a result the tokens up to the first draft that does not hold.

        The tensors must be in host memory.

        Args:
            result: has k + 1 tokens of each row, and as many log-probabilities if any.
        """
        accepted, drafts = self.num_accepted.numpy(), self.token_ids.numpy()
        token_ids = read_int32(result.token_ids).reshape(
            len(accepted), len(self.sampled) // max(1, len(accepted))
        )
        is_kept = (np.arange(token_ids.shape[1]) <= accepted[:, None]).ravel()
        result.token_ids = pack_int32(token_ids.ravel()[is_kept])
        if result.logprobs:
            shape = (len(is_kept), result.num_top_logprobs)
            top_token_ids = read_int32(result.top_token_ids).reshape(shape)
            top_logprobs = read_float32(result.top_logprobs).reshape(shape)
            result.logprobs = pack_float32(read_float32(result.logprobs)[is_kept])
            result.top_token_ids = pack_int32(top_token_ids[is_kept])
            result.top_logprobs = pack_float32(top_logprobs[is_kept])
        result.num_accepted_tokens = pack_int32(accepted)
        result.draft_token_ids = pack_int32(drafts)
        result.drafted_by_graph = self.by_graph
