"""Where the time of a steady decode step goes: `python -m tests.bench.step_trace`.

    python -m tests.bench.step_trace --shape qwen3-0.6b --batch 1,256 --svg steps.svg [engine flags]

Scheduler and ModelRunner run in one process with two steps in flight, as the engine keeps them, and
every message is serialized and parsed. Host times come from steps without a profiler; what the
device did comes from a few more under torch.profiler, which are drawn. Service and worker share one
thread here, while in the engine they are two processes: the device is idle there at most as long.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from services.engine.server import collect_garbage_rarely
from tests.bench.program import print_report, reported
from tests.bench.report import Report
from tests.bench.settings import Settings, list_of_numbers, make_parser
from tests.bench.steady_decode import PROMPT_LEN, SteadyDecode
from tests.bench.step_engine import chosen_device, make_engine, traced_events
from tests.bench.svg import Picture
from tests.bench.trace_intervals import Interval, Timeline, device_use, merged, read_timeline
from tests.support.graph_engine import GraphEngine

WARM_UP_STEPS = 16
ROUNDS = 5
SETTLING_STEPS = 4
"""Steps under the profiler that are left out: the first ones wait for what it sets up."""
HOSTS = {"schedule and update": ("schedule", "update"), "worker": ("execute", "result")}
"""Sections of a step that its two processes spend their own time in; the rest is waiting."""

COLOURS = {
    "schedule": "#2563a8",
    "update": "#4ba3c3",
    "execute": "#3a8f5c",
    "result": "#8fbf5a",
    "wait": "#e2e2e2",
}
DEVICE_COLOURS = ("#d08a2e", "#a8522e")
WIDTH, LEFT, PANEL, ROW = 1100, 60, 110, 26
"""Pixels of the picture."""


def make_batch_engine(settings: Settings, device: str) -> GraphEngine:
    """Returns scheduler and runner with room for the largest batch, all graphs captured."""
    largest = max(settings.arguments.batch)
    length = PROMPT_LEN + total_steps(settings.arguments) + 80
    engine = make_engine(
        settings,
        device,
        max_num_seqs=largest,
        max_num_batched_tokens=max(2048, largest),
        max_model_len=min(settings.max_model_len, 8 * length),
        num_blocks=largest * -(-length // settings.config.cache.block_size) + 16,
    )
    engine.capture()
    return engine


def total_steps(arguments: argparse.Namespace) -> int:
    """Returns how many steps one batch takes."""
    return 2 * WARM_UP_STEPS + arguments.steps + arguments.profiled_steps


def measure(
    engine: GraphEngine, batch: int, settings: Settings, report: Report, device: str
) -> Timeline:
    """Measures and reports one batch size; returns the profiled steps."""
    arguments = settings.arguments
    decode = SteadyDecode(engine, batch, total_steps(arguments), settings.model.vocab_size)
    _run(decode, WARM_UP_STEPS)
    rounds = [_timed(decode, max(1, arguments.steps // ROUNDS)) for _ in range(ROUNDS)]
    timeline = _profiled(decode, arguments.profiled_steps, device)
    decode.end()
    name = f"batch {batch}"
    report.add(f"{name}, step", [each["step"] for each in rounds], "us")
    for host, parts in HOSTS.items():
        values = [sum(each[part] for part in parts) for each in rounds]
        report.add(f"{name}, host, {host}", values, "us")
    middle = {part: median(each[part] for each in rounds) for part in rounds[0]}
    facts: dict[str, object] = {part: round(value, 1) for part, value in middle.items()}
    # The last step may be cut off.
    use = device_use(timeline.device[SETTLING_STEPS:-1])
    if use is not None:
        busy_us = use.busy_us / use.num_steps
        report.add(f"{name}, device busy", [busy_us], "us")
        report.add(f"{name}, device idle between steps", [use.idle_between_share], "share")
        report.add(f"{name}, device idle within steps", [use.idle_within_share], "share")
        facts["idle_share_without_profiler"] = round(max(0.0, 1 - busy_us / middle["step"]), 4)
    report.state(name, facts)
    return timeline


def _timed(decode: SteadyDecode, num_steps: int) -> dict[str, float]:
    """Returns microseconds of a step on average, and medians of its sections."""
    decode.times_us.clear()
    started_s = time.perf_counter()
    _run(decode, num_steps)
    step_us = (time.perf_counter() - started_s) / num_steps * 1e6
    return {"step": step_us} | {part: median(each) for part, each in decode.times_us.items()}


def _run(decode: SteadyDecode, num_steps: int) -> None:
    for _ in range(num_steps):
        decode.step()


def _profiled(decode: SteadyDecode, num_steps: int, device: str) -> Timeline:
    """Runs steps under the profiler."""
    decode.is_profiled = True
    events = traced_events(lambda: _run(decode, num_steps), device)
    decode.is_profiled = False
    return read_timeline(events)


def draw(timelines: dict[str, Timeline], num_steps: int) -> Picture:
    """Draws the host's row and the device's row of some steps of each batch size."""
    picture = Picture(WIDTH, 50 + PANEL * len(timelines), "Steady decode steps")
    device_colours = dict(zip(("device", "next step"), DEVICE_COLOURS, strict=True))
    picture.legend(LEFT, 24, COLOURS | device_colours)
    for number, (name, timeline) in enumerate(timelines.items()):
        _draw_steps(picture, 50 + PANEL * number, name, timeline, num_steps)
    return picture


def _draw_steps(
    picture: Picture, top: float, name: str, timeline: Timeline, num_steps: int
) -> None:
    updates = timeline.host["update"]
    first = min(len(updates) - 2, SETTLING_STEPS)
    last = min(len(updates) - 1, first + num_steps)
    window = Interval(updates[first].end, max(updates[last].end, updates[first].end + 1))
    scale = (WIDTH - LEFT - 10) / (window.end - window.start)
    words = f"{name}: {last - first} steps under the profiler, {window.end - window.start:.0f} us"
    picture.text(LEFT, top + 12, words, size=13)
    host_top, device_top = top + 20, top + 24 + ROW
    picture.text(4, host_top + ROW / 2 + 4, "host")
    picture.text(4, device_top + ROW / 2 + 4, "device")
    drawn = [(timeline.host.get(part, []), COLOURS[part], host_top, part) for part in COLOURS]
    for index, step in enumerate(timeline.device):
        # Kernels closer than a third of a pixel would only make the file large.
        joined = merged(step, gap=0.3 / scale)
        drawn.append((joined, DEVICE_COLOURS[index % 2], device_top, f"step {index}"))
    for intervals, colour, y, what in drawn:
        for each in intervals:
            start, end = max(each.start, window.start), min(each.end, window.end)
            if start < end:
                x = LEFT + (start - window.start) * scale
                tip = f"{what}: {each.end - each.start:.1f} us"
                picture.rect(x, y, (end - start) * scale, ROW, fill=colour, tip=tip)


def own_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=list_of_numbers, default=[1, 256], help="batch sizes")
    parser.add_argument("--steps", type=int, default=200, help="steps timed without profiler")
    parser.add_argument("--profiled-steps", type=int, default=24, help="at least 6")
    parser.add_argument("--drawn-steps", type=int, default=4)
    parser.add_argument("--svg", type=Path, help="draw the timeline to this file")
    return parser


def main() -> None:
    """Measures, draws and prints."""
    with reported("step_trace", own_parser()) as (settings, report):
        arguments, device = settings.arguments, chosen_device(settings)
        torch.set_num_threads(settings.config.worker.num_threads)
        engine = make_batch_engine(settings, device)
        collect_garbage_rarely()
        timelines = {}
        for batch in arguments.batch:
            if not settings.budget.left_s:
                report.problem(f"batch {batch}: out of time")
                continue
            timelines[f"batch {batch}"] = measure(engine, batch, settings, report, device)
            if arguments.svg is not None:
                draw(timelines, arguments.drawn_steps).write(arguments.svg)
    print_report(report)


if __name__ == "__main__":
    main()
