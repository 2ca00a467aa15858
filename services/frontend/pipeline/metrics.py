"""The frontend's metrics for Prometheus."""

from collections.abc import Iterable
from typing import Any

from services.frontend.engine_client.pool import EnginePool
from services.frontend.engine_client.swapper import Swapper
from services.frontend.errors import EngineFaultError, FrontendError
from services.frontend.pipeline.request_counts import (
    HOSTED_KINDS,
    IMAGE_REFUSALS,
    RequestCounts,
)
from services.frontend.pipeline.request_log import CANCELLED
from services.processes.heartbeats import Heartbeats
from services.telemetry.loop_lag import LoopLag
from services.telemetry.metrics import Families
from services.transport.refused_calls import RefusedCalls

FINISHED = ("stop", "length", "aborted")
FAILED = (
    CANCELLED,
    EngineFaultError.__name__,
    *(each.__name__ for each in FrontendError.__subclasses__()),
)
"""Label values that exist from the start, with a count of 0."""


class FrontendFamilies:
    """Collects the frontend's current metrics.

    The prefix separates them from the engine's metrics, which exclude network and tokenizer.
    """

    def __init__(
        self,
        counts: RequestCounts,
        engine: EnginePool,
        lag: LoopLag,
        refused: RefusedCalls,
        beats: Heartbeats | None = None,
    ) -> None:
        """Reads all at each call; `beats` are those of several processes."""
        self._beats = beats
        self._refused = refused
        self._lag = lag
        self._counts = counts
        self._engine = engine
        self._families = Families("octavo_frontend")

    def __call__(self) -> Iterable[Any]:
        """Returns every family."""
        counts, families = self._counts, self._families
        yield families.gauge("requests_live", counts.num_live, "Requests that have not ended")
        if self._beats is not None:
            meaning = "Processes that have given a sign of life lately"
            yield families.gauge("processes_serving", self._beats.num_serving, meaning)
            meaning = "Processes that died, or hung and were killed"
            yield families.counters("processes_lost", "reason", self._beats.num_lost, meaning)
        yield families.gauge("engine_ready", self._engine.is_ready, "1 while an engine is ready")
        engines = self._engine.engines
        yield families.gauge("engines", len(engines), "Engines known, used or not")
        yield families.gauge(
            "engines_used", sum(not each.reason for each in engines), "Engines that get requests"
        )
        yield families.counter(
            "retries", self._engine.counts.num_retries, "Requests sent again before a first token"
        )
        yield families.counter(
            "migrations", self._engine.counts.num_migrations, "Times an engine went on for another"
        )
        yield families.counter(
            "engine_overruns",
            self._engine.counts.num_overruns,
            "Requests ended because an engine sent more tokens than they may have",
        )
        if self._engine.swapper is not None:
            yield from self._swaps(self._engine.swapper)
        yield families.counters(
            "request_success",
            "finished_reason",
            dict.fromkeys(FINISHED, 0) | counts.finished,
            "Requests that were served, by finish reason",
        )
        yield families.counters(
            "requests_failed",
            "error",
            dict.fromkeys(FAILED, 0) | counts.failed,
            "Requests that were refused or failed, by error",
        )
        yield families.counter(
            "calls_refused",
            self._refused.num_calls,
            "Calls without a known key, or under a host that is not answered",
        )
        yield families.counters(
            "hosted_tools_left_out",
            "kind",
            dict.fromkeys(HOSTED_KINDS, 0) | counts.left_out,
            "Tools of a vendor's own servers that models did not get, by kind",
        )
        yield from families.loop_lag(self._lag)
        yield families.counter("prompt_tokens", counts.prompt_tokens, "Prompt tokens served")
        yield families.counter("cached_tokens", counts.cached_tokens, "Those found computed")
        yield families.counter("generation_tokens", counts.output_tokens, "Tokens generated")
        images = counts.images
        yield families.counter("images_read", images.num_read, "Images read")
        yield families.counter(
            "images_cached",
            images.num_cached,
            "Images that had been read lately, and were not again",
        )
        yield families.counters(
            "images_refused",
            "reason",
            dict.fromkeys(IMAGE_REFUSALS, 0) | images.refused,
            "Refusals of requests for their images, by reason",
        )
        yield families.counter(
            "image_bytes_sent", self._engine.counts.num_image_bytes, "Patches sent to engines"
        )
        yield families.histogram("image_read_seconds", images.read, "File to patches, with waits")
        yield families.histogram("tokenize_seconds", counts.tokenize, "Arrival to tokens")
        yield families.histogram("submit_seconds", counts.submit, "Tokens to the engine's yes")
        yield families.histogram(
            "time_to_first_token_seconds", counts.time_to_first_token, "Arrival to first token"
        )
        yield families.histogram(
            "inter_token_latency_seconds", counts.inter_token_latency, "Token to token"
        )
        yield families.histogram(
            "e2e_request_latency_seconds", counts.e2e_request_latency, "Arrival to end"
        )

    def _swaps(self, swapper: Swapper) -> Iterable[Any]:
        """Returns the families of models that share a card."""
        families, counts = self._families, swapper.counts
        none = dict.fromkeys(swapper.awake, 0)
        yield families.gauges("model_awake", "model", swapper.awake, "1 while it has the card")
        yield families.gauges(
            "swap_waiting_requests", "model", swapper.num_waiting, "Requests that wait for a model"
        )
        yield families.counters(
            "model_wakes", "model", none | counts.num_wakes, "Times that a model was woken"
        )
        yield families.counters(
            "swap_failures", "model", none | counts.num_failures, "Orders that failed, by model"
        )
        yield families.counter(
            "swap_kept_requests", counts.num_kept, "Requests that ran when their model fell asleep"
        )
        yield families.histogram(
            "swap_seconds", counts.seconds, "One model's order to sleep to the other's being awake"
        )
