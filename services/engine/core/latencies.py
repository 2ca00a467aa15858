"""Histograms of the times of requests."""

from collections import Counter
from dataclasses import dataclass, field

from services.engine.request import Request, StepMark
from services.engine.scheduler.step_outputs import StepOutputs
from services.telemetry.histogram import LATENCY_BOUNDS_S, TOKEN_BOUNDS, Histogram


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BOUNDS)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times in seconds and lengths in tokens.

    The first two are counted per step, the others when a request ends for any reason.
    """

    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token_latency: Histogram = field(default_factory=_latency)
    e2e_request_latency: Histogram = field(default_factory=_latency)
    request_queue_time: Histogram = field(default_factory=_latency)
    request_prefill_time: Histogram = field(default_factory=_latency)
    request_decode_time: Histogram = field(default_factory=_latency)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)

    def count_step(self, outputs: StepOutputs) -> None:
        """Counts the tokens of one step.

        Requests whose last tokens came in the same step waited equally long: a steady batch costs
        one observation.
        """
        at_s = 0.0
        waited_since: Counter[StepMark] = Counter()
        for column in outputs.columns:
            at_s = column.at_s
            waited_since.update(column.waited)
        for output in outputs.others:
            request, previous, num_tokens = output.request, output.previous, len(output.token_ids)
            if not num_tokens or request.last_token is None:
                continue  # the output only ends the request
            at_s = request.last_token.at_s
            if previous is None:
                self.time_to_first_token.observe(at_s - request.arrival_s)
            elif num_tokens == 1:
                waited_since[previous] += 1
            else:
                gap_s = (at_s - previous.at_s) / num_tokens
                self.inter_token_latency.observe(gap_s, num_tokens)
        for previous, count in waited_since.items():
            self.inter_token_latency.observe(at_s - previous.at_s, count)

    def count_end(self, request: Request, end_s: float) -> None:
        """Counts a request that has ended."""
        started, first, last = request.started, request.first_token, request.last_token
        started_s = end_s if started is None else started.at_s
        self.e2e_request_latency.observe(end_s - request.arrival_s)
        self.request_queue_time.observe(started_s - request.arrival_s)
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generation_tokens.observe(request.num_output_tokens)
        if first is not None and last is not None:
            self.request_prefill_time.observe(first.at_s - started_s)
            self.request_decode_time.observe(last.at_s - first.at_s)
