"""The serving workload in modelled time, without a GPU: `python -m tests.bench.serving_model`.

    python -m tests.bench.serving_model --shape qwen3.5-35b-a3b \
        --decodes 1:2.448,8:6.057,32:12.3,128:21.5,256:27.92 --prompts 2048:42.15,8192:117.7 \
        --policy max_num_seqs=256 --policy max_num_seqs=512,max_num_batched_tokens=4096

The scheduler, its limits, the sizes of its graphs and the memory that it gives out are the
engine's; the time of a step is interpolated between measured ones, see `StepTimes`. So the result
says where the time of a policy goes, and what another would take, before a GPU is asked.
"""

import argparse
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median

import numpy as np
import torch

from models.config import ModelConfig
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.stored_formats import keep_stored_formats
from models.registry import model_class
from services.engine.batch import BatchDescriptor, read_int32, step_result
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.config.engine_config import EngineConfig
from services.engine.limits import StepLimits
from services.engine.request import Request, SamplingParams
from services.engine.scheduler.dispatcher import GraphDispatcher
from services.engine.scheduler.scheduler import ScheduledStep, Scheduler
from services.engine.worker.start.graph_setup import configured_keys
from services.engine.worker.start.kv_memory import (
    MAX_BLOCKS_FROM_MEMORY,
    block_bytes,
    state_pages,
)
from tests.bench.figures import DECODE_OUTPUT, DECODE_PROMPT
from tests.bench.floor import BYTES_PER_MS, FLOP_PER_MS, StepFloor, step_floor
from tests.bench.program import print_report, reported
from tests.bench.settings import Settings, make_parser
from tests.bench.workload import Job, fitted, serving_jobs
from tests.support.requests import RecordingSink

STEPS_IN_FLIGHT = 2
ATTENTION_SHARE = 0.78
"""Share of the card's speed that attention reaches, in reads and products (docs/kernels)."""
MEMORY_BYTES = 143771 * 2**20
"""Memory of an H200."""
MANY_TOKENS = 8192
"""Tokens that touch all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds of steps, interpolated between measured ones.

    A step takes as long as its decodes and its prompts apart, less the weights that both would
    read. Those of prompts are what a line through the measured ones has left at no tokens.
    Attention is counted by the bytes or products of each context.

    decodes: milliseconds by requests, at the context that tests.bench.offline measures at. prompts:
    by tokens of one prompt.
    """

    decodes: Sequence[tuple[float, float]]
    prompts: Sequence[tuple[float, float]]
    floor: StepFloor

    def ms(self, num_decodes: int, num_cached: int, prompts: Sequence[tuple[int, int]]) -> float:
        """Returns the time of a step.

        Args:
            num_decodes: requests that decode.
            num_cached: the tokens before those of all decodes.
            prompts: of each other request, tokens computed before the step and in it.
        """
        num_tokens = sum(count for _, count in prompts)
        elapsed_ms = self._decode_ms(num_decodes, num_cached) if num_decodes else 0.0
        if num_tokens:
            weights, each = self._prompt_line()
            read = self._touched(num_tokens)
            if num_decodes:
                read -= min(read, self._touched(num_decodes))
            elapsed_ms += weights * read + each * num_tokens
            elapsed_ms += sum(self._attention_ms(*prompt) for prompt in prompts)
        return elapsed_ms

    def _decode_ms(self, num_decodes: int, num_cached: int) -> float:
        beyond = num_cached - (DECODE_PROMPT + DECODE_OUTPUT // 2) * num_decodes
        of_cache = beyond * self.floor.cache_bytes(1) / BYTES_PER_MS / ATTENTION_SHARE
        return interpolate(self.decodes, num_decodes) + of_cache

    def _touched(self, num_tokens: int) -> float:
        """Returns the share of the weights that tokens read."""
        return self.floor.weight_bytes(num_tokens) / self.floor.weight_bytes(MANY_TOKENS)

    def _prompt_line(self) -> tuple[float, float]:
        """Returns what prompts take without any tokens, and for each token, without attention."""
        (first, first_ms), (last, last_ms) = self.prompts[0], self.prompts[-1]
        first_ms -= self._attention_ms(0, int(first))
        last_ms -= self._attention_ms(0, int(last))
        each = (last_ms - first_ms) / (last - first)
        return max(0.0, first_ms - each * first), each

    def _attention_ms(self, start: int, count: int) -> float:
        flop = self.floor.prompt_attention_flop
        return (flop(start + count) - flop(start)) / FLOP_PER_MS / ATTENTION_SHARE


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value at a place between the nearest two points, or on the line beyond them."""
    place = min(max(bisect_right([x for x, _ in points], at), 1), len(points) - 1)
    (left, low), (right, high) = points[place - 1], points[place]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(slots=True)
class Outcome:
    """Seconds and steps of a modelled run; `_ms` are times of steps and gaps between tokens."""

    seconds: float = 0.0
    step_ms: dict[str, list[float]] = field(default_factory=dict)
    """Times of steps, by their kind."""
    running: list[int] = field(default_factory=list)
    """Requests in each step."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that graphs computed, and padding among them."""
    first_s: list[float] = field(default_factory=list)
    """From the beginning to each request's first token."""
    gaps_ms: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_snapshots: int = 0

    def facts(self) -> dict[str, object]:
        """Returns where the time went."""
        gaps, most = sorted(self.gaps_ms), max(self.running)
        return {
            "steps": {kind: len(each) for kind, each in self.step_ms.items()},
            "seconds": {kind: round(sum(each) / 1000, 2) for kind, each in self.step_ms.items()},
            "running on average": round(mean(self.running)),
            "running at most": most,
            "steps with less than a quarter of these": sum(n < most / 4 for n in self.running),
            "padding": round(self.tokens["padding"] / max(1, self.tokens["graphs"]), 4),
            "first token, s, median and last": (
                round(median(self.first_s), 2),
                round(max(self.first_s), 2),
            ),
            "between tokens, ms, median, p99, longest": [
                round(gaps[int(part * (len(gaps) - 1))], 1) for part in (0.5, 0.99, 1)
            ],
            "preemptions": self.num_preemptions,
            "snapshots": self.num_snapshots,
        }


class ModelledRun:
    """Runs requests through a scheduler in modelled time, with two steps in flight."""

    def __init__(
        self, make_scheduler: Callable[[Callable[[], float]], Scheduler], times: StepTimes
    ) -> None:
        """Starts at 0 s.

        Args:
            make_scheduler: gets the modelled clock.
            times: of steps.
        """
        self._now_s = 0.0
        self._times = times
        self._scheduler = make_scheduler(lambda: self._now_s)
        self._last_s: dict[Request, float] = {}
        self._outcome = Outcome()

    def run(self, requests: Sequence[Request]) -> Outcome:
        """Returns what requests take that are submitted at once."""
        for request in requests:
            self._scheduler.add(request)
        in_flight: deque[ScheduledStep] = deque()
        while True:
            while len(in_flight) < STEPS_IN_FLIGHT:
                step = self._scheduler.schedule()
                if step is None:
                    break
                in_flight.append(step)
            if not in_flight:
                break
            self._complete(in_flight.popleft())
        counts = self._scheduler.counts
        self._outcome.seconds = self._now_s
        self._outcome.num_preemptions = counts.num_preemptions
        self._outcome.num_snapshots = counts.num_snapshots_made
        return self._outcome

    def _complete(self, step: ScheduledStep) -> None:
        outcome, descriptor = self._outcome, step.descriptor
        num_decodes, num_cached, prompts = _work(descriptor)
        name = "decodes" if not prompts else "mixed" if num_decodes else "prompts"
        if descriptor.HasField("graph_key"):
            num_padded = descriptor.graph_key.num_tokens - descriptor.context.num_tokens
            outcome.tokens += Counter(graphs=descriptor.graph_key.num_tokens, padding=num_padded)
            # One request without a state has all missing tokens.
            prompts += [(0, num_padded)] if prompts else []
        else:
            name += ", eager"
        elapsed_ms = self._times.ms(num_decodes, num_cached, prompts)
        outcome.step_ms.setdefault(name, []).append(elapsed_ms)
        outcome.running.append(descriptor.context.batch_size)
        self._now_s += elapsed_ms / 1000
        for request in step.requests:
            last_s = self._last_s.get(request)
            if last_s is None:
                outcome.first_s.append(self._now_s)
            else:
                outcome.gaps_ms.append(1000 * (self._now_s - last_s))
            self._last_s[request] = self._now_s
        self._scheduler.update(step, step_result(step.step_id, [7] * len(step.requests)))


def _work(descriptor: BatchDescriptor) -> tuple[int, int, list[tuple[int, int]]]:
    """Returns a step's decodes, the tokens before these, and the parts of prompts.

    A last single token of a prompt counts as a decode.
    """
    attention = descriptor.attn_metadata
    counts = np.diff(read_int32(attention.query_start_loc))
    starts = read_int32(attention.seq_lens) - counts
    decodes = counts == 1
    prompts = zip(starts[~decodes].tolist(), counts[~decodes].tolist(), strict=True)
    return int(decodes.sum()), int(starts[decodes].sum()), list(prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a model's weights, as they are stored, and of a block, and blocks of a state."""

    weight_bytes: int
    block_bytes: int
    state_pages: int

    @classmethod
    def of(cls, config: EngineConfig, model_config: ModelConfig, limits: StepLimits) -> "Sizes":
        """Reads them from a model without weights."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, model_config.dtype))
        try:
            with torch.device("meta"), torch.no_grad():
                model = model_class(model_config.architecture)(model_config)
        finally:
            torch.set_default_dtype(previous)
        if model_config.quantization is not None:
            keep_stored_formats(model, None, {})
        size, dtype = limits.block_size, cache_dtype(config, model_config)
        return cls(
            weight_bytes=sum(each.nbytes for each in model.parameters()),
            block_bytes=block_bytes(
                model, block_size=size, dtype=dtype, groups=limits.layer_groups
            ),
            state_pages=state_pages(model, block_size=size, dtype=dtype),
        )


def cache_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Returns the dtype of keys and values."""
    is_auto = config.cache.kv_cache_dtype == "auto"
    dtype: torch.dtype = getattr(torch, model.dtype) if is_auto else FP8_CACHE_DTYPE
    return dtype


def run_policy(
    settings: Settings, config: EngineConfig, jobs: Sequence[Job], times: StepTimes
) -> tuple[Outcome, dict[str, object]]:
    """Returns what jobs take with one configuration, and what the memory holds."""
    model = settings.model
    limits = StepLimits.of(
        config,
        max_model_len=settings.max_model_len,
        vocab_size=model.vocab_size,
        cache_windows=model.entry_windows(with_draft_layers=False),
    )
    sizes = Sizes.of(config, model, limits)
    limits = replace(limits, state_pages=sizes.state_pages, shared_prefix_tokens=0)
    needed = sizes.weight_bytes + settings.arguments.step_gib * 2**30
    room = MEMORY_BYTES * config.cache.gpu_memory_utilization - needed
    num_blocks = min(max(2, int(room) // sizes.block_bytes), MAX_BLOCKS_FROM_MEMORY)
    mode = config.compilation.graph_mode("cuda")
    keys = [wire_key(key) for key in configured_keys(mode, config.compilation, limits)]

    def make_scheduler(clock: Callable[[], float]) -> Scheduler:
        return Scheduler(
            limits,
            num_blocks=num_blocks,
            max_num_waiting=len(jobs),
            enable_prefix_caching=config.cache.enable_prefix_caching,
            dispatcher=GraphDispatcher(keys, planned=keys),
            clock=clock,
        )

    requests = [
        Request(
            request_id=str(number),
            handle=number,
            prompt_token_ids=job.prompt,
            sink=RecordingSink(),
            arrival_s=0.0,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=job.num_output),
        )
        for number, job in enumerate(jobs)
    ]
    longest = max(len(job.prompt) + job.num_output for job in jobs)
    of_longest = limits.num_state_blocks - (-longest // limits.block_size) * limits.num_groups
    memory: dict[str, object] = {
        "blocks": num_blocks,
        "requests of the longest": num_blocks // of_longest,
    }
    return ModelledRun(make_scheduler, times).run(requests), memory


def points(text: str) -> list[tuple[float, float]]:
    """Reads "1:2.4,8:6.1"."""
    pairs = (part.split(":") for part in text.split(","))
    read = sorted((float(first), float(second)) for first, second in pairs)
    if len(read) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes two points or more")
    return read


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--decodes", type=points, required=True, help="milliseconds a step by requests"
    )
    parser.add_argument(
        "--prompts", type=points, required=True, help="milliseconds by tokens of a prompt"
    )
    parser.add_argument(
        "--policy", action="append", default=[], help="flags of the engine to model, name=value,..."
    )
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--step-gib", type=float, default=6.0, help="of steps and graphs")
    parser.add_argument("--divide-by", type=int, default=1, help="make all lengths shorter")
    return parser


def main() -> None:
    """Models each policy and prints."""
    with reported("serving_model", own_parser()) as (settings, report):
        arguments = settings.arguments
        times = StepTimes(
            decodes=arguments.decodes,
            prompts=arguments.prompts,
            floor=step_floor(settings.model, cache_dtype(settings.config, settings.model)),
        )
        jobs = fitted(
            serving_jobs(arguments.requests),
            vocab_size=settings.model.vocab_size,
            max_model_len=settings.max_model_len,
            divide_by=arguments.divide_by,
        )
        for policy in arguments.policy or [""]:
            flags = dict(each.split("=", 1) for each in policy.split(",") if each)
            config = settings.config.with_flags(**flags)
            outcome, memory = run_policy(settings, config, jobs, times)
            name = f"serving, {policy}" if policy else "serving"
            report.add(name, [outcome.seconds], "s")
            report.state(name, memory | outcome.facts())
    print_report(report)


if __name__ == "__main__":
    main()
