"""The results of a step on the device: the forward pass's output and the sampled tokens."""

from dataclasses import dataclass

from torch import Tensor

from services.engine.batch import FallbackReason
from services.engine.sampling.logprobs import Logprobs
from services.engine.worker.inputs.input_buffers import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """The output of a step's forward pass; valid until the next replay of a graph.

    hidden: [T, hidden]. logits: [n, V / ranks], this rank's, after the query tokens where the step
        samples; None if it samples nothing.
    token_ids: [n] int32, the most likely tokens; None unless a graph chose them. Without drafts
        the graph has written them into their rows.
    fallback_reason: why the ordered graph did not run; unspecified if the order was followed.
    """

    header: Header
    hidden: Tensor
    logits: Tensor | None
    token_ids: Tensor | None
    fallback_reason: FallbackReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens that a step sampled, or the vectors that it pooled.

    token_ids: [n] int32. logprobs, prompt_logprobs: of these and of prompt tokens, if wanted.
    pooled: [n, size] float32; then there are no tokens.
    """

    token_ids: Tensor
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: Tensor | None = None
