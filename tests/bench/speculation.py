"""Cost of drafting, and the acceptance at which it pays: `python -m tests.bench.speculation`.

    python -m tests.bench.speculation --shape deepseek-v3 --num-layers 4 --drafts 0,1,2,3

Scheduler and ModelRunner run in one process, with two steps in flight, as in the engine;
`--in-flight 1` waits for each result with drafts. Decode steps run by whole graphs; drafting first
eagerly, then by its own.
Random weights guess next to nothing right, which leaves a step's cost as it is: with r, the time of
a step with k drafts over that of one without, k drafts pay if more than r - 1 of them hold on
average; that is the share (r - 1) / k of all drafts. *break-even* is r - 1.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch

from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from services.engine.batch import read_int32
from services.engine.server import collect_garbage_rarely
from services.engine.worker.start.device import choose_dtype
from tests.bench.program import reported
from tests.bench.report import Report
from tests.bench.settings import Settings, list_of_numbers, make_parser
from tests.bench.steady_decode import PROMPT_LEN, SteadyDecode
from tests.bench.step_engine import chosen_device
from tests.support.graph_engine import GraphEngine

WARM_UP_STEPS = 8
ROUNDS = 5


class Watch:
    """Takes the time from the end of sampling to the end of drafting, on a GPU by its clock."""

    def __init__(self, engine: GraphEngine) -> None:
        self._is_cuda = engine.runner.device.type == "cuda"
        self._sampled: list = []
        self._drafted: list = []
        self.num_tokens: list[int] = []
        self.is_open = False
        engine.runner.watch_outputs(lambda hidden, logits: self._note(self._sampled))

    def _note(self, times: list) -> None:
        if not self.is_open:
            return
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            times.append(event)
        else:
            times.append(time.perf_counter())

    def run(self, engine: GraphEngine, num_steps: int) -> float:
        """Runs steps one by one; returns the median microseconds of drafting."""
        self._sampled, self._drafted, self.is_open = [], [], True
        for _ in range(num_steps):
            step = engine.scheduler.schedule()
            assert step is not None
            pending = engine.runner.execute(step.descriptor)
            self._note(self._drafted)
            result = pending.message()
            self.num_tokens.append(len(read_int32(result.token_ids)))
            engine.scheduler.update(step, result)
        self.is_open = False
        pairs = list(zip(self._sampled, self._drafted, strict=True))
        if self._is_cuda:
            torch.cuda.synchronize()
            return median(start.elapsed_time(end) for start, end in pairs) * 1000
        return median(end - start for start, end in pairs) * 1e6


def make_engine(
    settings: Settings, device: str, dtype: torch.dtype, model: CausalLM, num_drafts: int
) -> GraphEngine:
    """Returns scheduler and runner whose decode steps have graphs, and their drafting none yet."""
    config, batches = settings.config, settings.arguments.batch
    # The same for all, as graphs plan their attention for the longest sequence there can be.
    length = PROMPT_LEN + total_tokens(settings.arguments, max(settings.arguments.drafts)) + 80
    sizes = {"cudagraph_capture_sizes": sorted(batches)}
    mode = {"cudagraph_mode": "full_decode_only"}
    engine = GraphEngine(
        config.checkpoint.model,
        config.compilation.model_copy(update={**sizes, **mode}),
        device=device,
        dtype=dtype,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(2048, max(batches) * (1 + num_drafts)),
        max_model_len=min(settings.max_model_len, 2 * length),
        num_blocks=max(batches) * -(-length // config.cache.block_size) + 16,
        num_states=max(batches) + 1,
        block_size=config.cache.block_size,
        num_speculative_tokens=num_drafts,
        model=model,
    )
    capture(engine, len(batches))
    return engine


def capture(engine: GraphEngine, num_graphs: int) -> None:
    """Captures up to `num_graphs` of the remaining graphs; none may fail its test."""
    faults = {outcome.fault for outcome in engine.capture(num_graphs)} - {""}
    if faults:
        raise SystemExit(f"graphs were given up: {'; '.join(sorted(faults))}")


def total_tokens(arguments: argparse.Namespace, num_drafts: int) -> int:
    """Returns how many tokens one batch may bring each request, in both ways of drafting."""
    return 2 * (1 + num_drafts) * (WARM_UP_STEPS + 2 * arguments.steps + 4)


def measure(engine: GraphEngine, settings: Settings, report: Report, name: str, k: int) -> None:
    """Measures and reports steady steps of every batch size."""
    arguments, watch = settings.arguments, Watch(engine)
    for batch in arguments.batch:
        if not settings.budget.left_s:
            report.problem(f"{name}, batch {batch}: out of time")
            continue
        decode = SteadyDecode(
            engine,
            batch,
            total_tokens(arguments, k),
            settings.model.vocab_size,
            steps_in_flight=arguments.in_flight if k else 2,
        )
        run(decode, WARM_UP_STEPS)
        num_steps = max(1, arguments.steps // ROUNDS)
        values = [timed(decode, num_steps) for _ in range(ROUNDS)]
        report.add(f"{name}, batch {batch}", values, "ms/step")
        if k:
            decode.drain()
            watch.num_tokens.clear()
            drafting_us = watch.run(engine, arguments.steps)
            report.add(f"{name}, batch {batch}, drafting", [drafting_us], "us")
            tokens = sum(watch.num_tokens) / len(watch.num_tokens) / batch
            report.state(f"{name}, batch {batch}, tokens of a request in a step", round(tokens, 3))
        decode.end()


def run(decode: SteadyDecode, num_steps: int) -> None:
    """Runs steps to their end."""
    for _ in range(num_steps):
        decode.step()


def timed(decode: SteadyDecode, num_steps: int) -> float:
    """Returns milliseconds of a step on average."""
    started_s = time.perf_counter()
    run(decode, num_steps)
    return (time.perf_counter() - started_s) / num_steps * 1000


def table(report: Report, batches: Sequence[int], drafts: Sequence[int]) -> str:
    """Returns a line for each batch size and number of drafts."""
    figures = {name: figure["median"] for name, figure in report.figures.items()}
    lines = [f"{'batch':>5} {'k':>2} {'drafting':8} {'ms/step':>9} {'drafting, ms':>13} break-even"]
    for batch in batches:
        base = figures.get(f"k = 0, batch {batch}")
        for k in drafts:
            for way in ("eager", "graph") if k else ("none",):
                name = f"k = {k}, {way}, batch {batch}" if k else f"k = 0, batch {batch}"
                if name not in figures:
                    continue
                step = figures[name]
                cost = f"{figures[f'{name}, drafting'] / 1000:13.3f}" if k else f"{'-':>13}"
                even = f"{step / base - 1:.2f} of {k}" if base and k else "-"
                lines.append(f"{batch:5} {k:2} {way:8} {step:9.3f} {cost} {even}")
    return "\n".join(lines)


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=list_of_numbers, default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--drafts", type=list_of_numbers, default=[0, 1, 2, 3], help="values of k")
    parser.add_argument(
        "--in-flight", type=int, choices=(1, 2), default=2, help="steps in flight with drafts"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps timed of each")
    return parser


def main() -> None:
    """Measures and prints."""
    with reported("speculation", own_parser()) as (settings, report):
        arguments, config = settings.arguments, settings.config
        device = chosen_device(settings)
        torch.set_num_threads(config.worker.num_threads)
        dtype = choose_dtype(config.checkpoint, settings.model, torch.device(device))
        model = load_model(
            config.checkpoint.model,
            device=torch.device(device),
            dtype=dtype,
            load_format=config.checkpoint.load_format,
            with_draft_layers=True,
        )
        report.note("loaded")
        collect_garbage_rarely()
        for k in arguments.drafts:
            engine = make_engine(settings, device, dtype, model, k)
            measure(engine, settings, report, f"k = {k}, eager" if k else "k = 0", k)
            if k:
                capture(engine, len(arguments.batch))
                measure(engine, settings, report, f"k = {k}, graph", k)
    print(table(report, arguments.batch, arguments.drafts))
    for fact, value in report.content["facts"].items():
        print(f"{fact}: {value}")


if __name__ == "__main__":
    main()
