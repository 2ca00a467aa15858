"""The result of a step that may still be on its way from the device."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.batch import FallbackReason, StepResult, set_prompt_logprobs, step_result
from services.engine.sampling.logprobs import Logprobs
from services.engine.spec_decode.verification import Verified
from services.engine.worker.inputs.transfer import to_host


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResult:
    """What a step sampled, in host memory that is valid once `done` has happened.

    token_ids: [S] int32. done: absent on a CPU, where every step is done at once.
    started_ns: `time.perf_counter_ns()` when the step began.
    fallback_reason: why the ordered graph did not run; unspecified when the order was followed.
    verified: with speculative decoding, what became of drafts; token_ids then has more of each row.
    """

    step_id: int
    token_ids: Tensor
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    done: torch.cuda.Event | None
    started_ns: int
    fallback_reason: FallbackReason
    verified: Verified | None = None

    @classmethod
    def begin(
        cls,
        step_id: int,
        token_ids: Tensor,
        logprobs: Logprobs | None,
        *,
        prompt_logprobs: Logprobs | None = None,
        started_ns: int,
        fallback_reason: FallbackReason,
        verified: Verified | None = None,
    ) -> "PendingResult":
        """Starts to copy what was sampled to the host, behind the work queued so far."""
        host_token_ids = to_host(token_ids)
        host_logprobs = None if logprobs is None else _on_host(logprobs)
        host_prompt_logprobs = None if prompt_logprobs is None else _on_host(prompt_logprobs)
        if verified is not None:
            verified = replace(
                verified,
                num_accepted=to_host(verified.num_accepted),
                draft_token_ids=to_host(verified.draft_token_ids),
            )
        done = None
        if token_ids.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            done.record()
        return cls(
            step_id=step_id,
            token_ids=host_token_ids,
            logprobs=host_logprobs,
            prompt_logprobs=host_prompt_logprobs,
            done=done,
            started_ns=started_ns,
            fallback_reason=fallback_reason,
            verified=verified,
        )

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]  # as above

    def message(self) -> StepResult:
        """Returns the result, waiting for the device if it must."""
        if self.done is not None:
            self.done.synchronize()
        result = self._sampled()
        if self.verified is not None:
            self.verified.trim(result)
        return result

    def _sampled(self) -> StepResult:
        """Returns all that was sampled, which has arrived."""
        elapsed_us = (time.perf_counter_ns() - self.started_ns) // 1000
        logprobs = self.logprobs
        result = step_result(
            self.step_id,
            self.token_ids.numpy(),
            logprobs=None if logprobs is None else logprobs.chosen.numpy(),
            top_token_ids=None if logprobs is None else logprobs.top_token_ids.numpy(),
            top_logprobs=None if logprobs is None else logprobs.top.numpy(),
            elapsed_us=elapsed_us,
            fallback_reason=self.fallback_reason,
        )
        told = self.prompt_logprobs
        if told is not None:
            set_prompt_logprobs(
                result, told.chosen.numpy(), told.top_token_ids.numpy(), told.top.numpy()
            )
        return result


def _on_host(logprobs: Logprobs) -> Logprobs:
    """Starts to copy log-probabilities to the host."""
    return Logprobs(
        chosen=to_host(logprobs.chosen),
        top_token_ids=to_host(logprobs.top_token_ids),
        top=to_host(logprobs.top),
    )
