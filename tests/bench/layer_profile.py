"""Kernels of a layer, and the time that each adds to a step: `python -m tests.bench.layer_profile`.

    python -m tests.bench.layer_profile --shape qwen3-8b-fp8 --kv-cache-dtype fp8_e4m3 \\
        --points 1,8,32,p2048,64+512 [--context 303] [engine flags]

A point N is a step of N requests that decode, pN a prompt of N tokens, N+M a step of N decodes and
a prompt of M tokens. Scheduler and ModelRunner run in one process, with the graphs by which the
engine runs these steps and no others. The time of a whole step is taken without a profiler. With
--shape a process for each point first builds its kernels with a few layers.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from services.engine.server import collect_garbage_rarely
from tests.bench.kernel_advances import usual_steps
from tests.bench.kernel_table import kernel_table, layer_us
from tests.bench.program import reported
from tests.bench.prompt_steps import PromptSteps
from tests.bench.report import Report
from tests.bench.settings import Settings, make_parser
from tests.bench.steady_decode import SteadyDecode
from tests.bench.step_engine import chosen_device, make_engine, traced_events
from tests.bench.step_points import Point, read_points, with_graphs_of
from tests.bench.trace_intervals import Work, work_of_steps

WARM_UP_STEPS = 4
ROUNDS, STEPS_OF_ROUND = 4, 10
"""Decode steps timed without a profiler."""
PROFILED_DECODES, PROFILED_PROMPTS = 14, 6
SETTLING_STEPS = 3
"""Profiled decode steps that are left out at the beginning; of prompts it is one."""
STEPS = WARM_UP_STEPS + ROUNDS * STEPS_OF_ROUND + PROFILED_DECODES
DEFAULT_POINTS = read_points("1,8,32,p2048,64+512")
BUILT_LAYERS = 4
"""Layers that show all kernels of a shape: DeepSeek's first three have no experts."""
BUILD_S = 120.0


class Profiler:
    """Measures points of one engine and prints their tables."""

    def __init__(
        self, settings: Settings, report: Report, device: str, points: Sequence[Point]
    ) -> None:
        self._settings = settings
        self._report = report
        self._device = device
        arguments, config = settings.arguments, settings.config
        limits = config.scheduler
        most_decodes = max(each.num_decodes for each in points)
        longest = max(each.num_prompt_tokens for each in points)
        block_size = config.cache.block_size
        self._engine = make_engine(
            settings,
            device,
            compilation=with_graphs_of(
                points,
                config.compilation,
                max_num_seqs=limits.max_num_seqs,
                max_num_tokens=limits.max_num_batched_tokens,
            ),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            num_blocks=most_decodes * -(-(arguments.context + STEPS) // block_size)
            + 2 * -(-longest // block_size)
            + 64,
            num_states=most_decodes + 4,
        )

    def capture(self) -> list[str]:
        """Captures all graphs; returns which were given up, and why."""
        outcomes = self._engine.capture()
        return [f"{each.key}: {each.fault}" for each in outcomes if each.fault]

    def warm_up(self, point: Point) -> None:
        """Runs a few steps, which builds their kernels."""
        with self._steps(point) as steps:
            _run(steps, WARM_UP_STEPS)

    def measure(self, point: Point) -> None:
        """Reports the time of a step and of a layer, and prints the table."""
        is_decode = not point.num_prompt_tokens
        with self._steps(point) as steps:
            _run(steps, WARM_UP_STEPS)
            walls = [_timed(steps, _steps_of_round(point)) for _ in range(ROUNDS)]
            steps.is_profiled = True
            events = traced_events(lambda: _run(steps, _profiled_steps(point)), self._device)
            key = steps.descriptor.graph_key
            has_graph = steps.descriptor.HasField("graph_key")
        self._report.add(f"{point}, step", walls, "us")
        graph = f"graph of {key.num_tokens} tokens" if has_graph else "no graph"
        print(f"\n=== {point}: {graph}", flush=True)
        # The last step may be cut off.
        traced = (
            work_of_steps(events)[SETTLING_STEPS:-1] if is_decode else work_of_steps(events)[1:]
        )
        self._print_table(point, traced)

    def _print_table(self, point: Point, traced: Sequence[Sequence[Work]]) -> None:
        steps = usual_steps(traced)
        if not steps:
            print(f"nothing ran on a device that the profiler watches ({self._device})")
            return
        lines = kernel_table(steps)
        print("\n".join(lines), flush=True)
        self._report.state(f"{point}, kernels", lines)
        if layers := layer_us(steps):
            self._report.add(f"{point}, layer", layers, "us")

    @contextmanager
    def _steps(self, point: Point) -> Iterator[SteadyDecode | PromptSteps]:
        """Yields the point's steps; what decodes beside its prompts ends afterwards."""
        engine, vocab_size = self._engine, self._settings.model.vocab_size
        prompts = PromptSteps(engine, point.num_prompt_tokens, vocab_size)
        if not point.num_decodes:
            yield prompts
            return
        before = WARM_UP_STEPS + ROUNDS * _steps_of_round(point) + _profiled_steps(point) // 2
        decode = SteadyDecode(
            engine,
            point.num_decodes,
            STEPS,
            vocab_size,
            prompt_len=max(1, self._settings.arguments.context - before),
        )
        try:
            decode.drain()
            yield prompts if point.num_prompt_tokens else decode
        finally:
            decode.end()


def chosen_points(settings: Settings) -> list[Point]:
    """Returns the command line's points, or those by default that the model and limits allow.

    Raises:
        SystemExit: a point of the command line does not fit into one step.
    """
    asked = settings.arguments.points
    reasons = {point: _limit_of(point, settings) for point in asked or DEFAULT_POINTS}
    if asked and any(reasons.values()):
        raise SystemExit("; ".join(f"{point}: {why}" for point, why in reasons.items() if why))
    return [point for point, why in reasons.items() if not why]


def _limit_of(point: Point, settings: Settings) -> str:
    """Returns why a point does not fit into one step; empty if it does."""
    limits = settings.config.scheduler
    if point.num_decodes + bool(point.num_prompt_tokens) > limits.max_num_seqs:
        return f"--max-num-seqs is {limits.max_num_seqs}"
    if point.num_tokens > limits.max_num_batched_tokens:
        return f"--max-num-batched-tokens is {limits.max_num_batched_tokens}"
    context = settings.arguments.context + STEPS if point.num_decodes else 0
    longest = max(context, point.num_prompt_tokens + 1)
    if longest > settings.max_model_len:
        return f"requests get {longest} tokens; the longest may have {settings.max_model_len}"
    return ""


def _steps_of_round(point: Point) -> int:
    return 1 if point.num_prompt_tokens else STEPS_OF_ROUND


def _profiled_steps(point: Point) -> int:
    return PROFILED_PROMPTS if point.num_prompt_tokens else PROFILED_DECODES


def _timed(steps: SteadyDecode | PromptSteps, num_steps: int) -> float:
    """Returns microseconds of a step on average."""
    started_s = time.perf_counter()
    _run(steps, num_steps)
    return (time.perf_counter() - started_s) / num_steps * 1e6


def _run(steps: SteadyDecode | PromptSteps, num_steps: int) -> None:
    for _ in range(num_steps):
        steps.step()


@contextmanager
def kernels_built_beside(
    points: Sequence[Point], num_layers: int, report: Report
) -> Iterator[Callable[[], None]]:
    """Starts a process for each point that builds its kernels; yields what waits for them all."""
    processes = {
        point: subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.bench.layer_profile", *sys.argv[1:]),
                *("--points", str(point), "--num-layers", str(num_layers), "--only-build"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"},
        )
        for point in points
    }

    def wait() -> None:
        until_s = time.monotonic() + BUILD_S
        for point, process in processes.items():
            try:
                _, errors = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                report.problem(f"{point}: its kernels took longer than {BUILD_S:.0f} s to build")
            else:
                if process.returncode:
                    report.problem(f"{point}: building its kernels failed\n{errors}")

    try:
        yield wait
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--points", type=read_points, help="such as 1,32,p2048,64+512")
    parser.add_argument("--context", type=int, default=303, help="tokens of requests that decode")
    parser.add_argument("--only-build", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measures and prints."""
    with reported("layer_profile", own_parser()) as (settings, report):
        arguments, device = settings.arguments, chosen_device(settings)
        points = chosen_points(settings)
        torch.set_num_threads(settings.config.worker.num_threads)
        if arguments.only_build:
            profiler = Profiler(settings, report, device, points)
            profiler.capture()
            for point in points:
                profiler.warm_up(point)
            return
        built = points if device == "cuda" and arguments.shape is not None else []
        num_layers = min(BUILT_LAYERS, settings.model.num_hidden_layers)
        with kernels_built_beside(built, num_layers, report) as wait:
            profiler = Profiler(settings, report, device, points)
            report.note("made the engine")
            wait()
        report.note("built kernels")
        for fault in profiler.capture():
            report.problem(fault)
        report.note("captured graphs")
        collect_garbage_rarely()
        for point in points:
            if settings.budget.left_s:
                profiler.measure(point)
            else:
                report.problem(f"{point}: out of time")
    print(f"\n{report.table()}")


if __name__ == "__main__":
    main()
