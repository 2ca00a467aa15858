"""The result of a step that the device may not have finished."""

import time
from dataclasses import dataclass

import torch

from services.engine.batch import (
    EncoderRun,
    FallbackReason,
    StepResult,
    set_prompt_logprobs,
    step_result,
)
from services.engine.sampling.logprobs import Logprobs
from services.engine.spec_decode.verification import Drafted
from services.engine.worker.inputs.transfer import to_host
from services.engine.worker.runner.outputs import Sampled


@dataclass(frozen=True, slots=True)
class PendingCopies:
    """The result of a step that copies blocks and computes nothing.

    block_copy_us: as in `PendingResult`.
    """

    step_id: int
    block_copy_us: int

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""
        return True

    def message(self) -> StepResult:
        """Returns the result."""
        return StepResult(step_id=self.step_id, block_copy_us=self.block_copy_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResult:
    """A step's result in host memory that is valid once `done` has happened.

    sampled: the tokens and log-probabilities. drafted: with speculative decoding, the verification
        and the next drafts; `sampled` then has k + 1 tokens of each row.
    done: absent on a CPU, where every step is done at once.
    started_ns: `time.perf_counter_ns()` when the step began.
    fallback_reason: why the ordered graph did not run; unspecified if the order was followed.
    block_copy_us: microseconds of copies between tiers that ended since the result before.
    encoder_run: how the step's images were encoded; None without any.
    """

    step_id: int
    sampled: Sampled
    drafted: Drafted | None
    done: torch.cuda.Event | None
    started_ns: int
    fallback_reason: FallbackReason
    block_copy_us: int
    encoder_run: EncoderRun | None

    @classmethod
    def begin(
        cls,
        step_id: int,
        sampled: Sampled,
        drafted: Drafted | None,
        *,
        started_ns: int,
        fallback_reason: FallbackReason,
        block_copy_us: int = 0,
        encoder_run: EncoderRun | None = None,
    ) -> "PendingResult":
        """Starts to copy a step's results to the host, after the work queued so far."""
        token_ids = sampled.token_ids if drafted is None else drafted.sampled
        host_token_ids = to_host(token_ids)
        host_sampled = Sampled(
            token_ids=host_token_ids,
            logprobs=_on_host(sampled.logprobs),
            prompt_logprobs=_on_host(sampled.prompt_logprobs),
            pooled=None if sampled.pooled is None else to_host(sampled.pooled),
        )
        if drafted is not None:
            drafted = Drafted(
                sampled=host_token_ids,
                num_accepted=to_host(drafted.num_accepted),
                token_ids=to_host(drafted.token_ids),
                by_graph=drafted.by_graph,
            )
        done = None
        if token_ids.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
            done.record()
        return cls(
            step_id=step_id,
            sampled=host_sampled,
            drafted=drafted,
            done=done,
            started_ns=started_ns,
            fallback_reason=fallback_reason,
            block_copy_us=block_copy_us,
            encoder_run=encoder_run,
        )

    @property
    def is_ready(self) -> bool:
        """Whether `message` returns without waiting."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]  # as above

    def message(self) -> StepResult:
        """Returns the result, waiting for the device if it must."""
        if self.done is not None:
            self.done.synchronize()
        elapsed_us = (time.perf_counter_ns() - self.started_ns) // 1000
        logprobs, prompt = self.sampled.logprobs, self.sampled.prompt_logprobs
        pooled = self.sampled.pooled
        result = step_result(
            self.step_id,
            self.sampled.token_ids.numpy(),
            logprobs=None if logprobs is None else logprobs.chosen.numpy(),
            top_token_ids=None if logprobs is None else logprobs.top_token_ids.numpy(),
            top_logprobs=None if logprobs is None else logprobs.top.numpy(),
            elapsed_us=elapsed_us,
            fallback_reason=self.fallback_reason,
            pooled=None if pooled is None else pooled.numpy(),
        )
        result.block_copy_us = self.block_copy_us
        if self.encoder_run is not None:
            result.encoder_run.CopyFrom(self.encoder_run)
        if prompt is not None:
            set_prompt_logprobs(
                result, prompt.chosen.numpy(), prompt.top_token_ids.numpy(), prompt.top.numpy()
            )
        if self.drafted is not None:
            self.drafted.trim(result)
        return result


def _on_host(logprobs: Logprobs | None) -> Logprobs | None:
    if logprobs is None:
        return None
    return Logprobs(
        chosen=to_host(logprobs.chosen),
        top_token_ids=to_host(logprobs.top_token_ids),
        top=to_host(logprobs.top),
    )
