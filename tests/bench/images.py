"""Prompts with images, against text of the same length.

python -m tests.bench.images --shape qwen3-vl-8b --max-num-seqs 128 --requests 1000 --outputs 16

An image is noise of --side patches squared; with patches of 16 pixels, 64 are a megapixel. First
tokens are measured alone, beside the floor of the encoder and of the prompt's products; then the
gaps between tokens of --streams requests while nothing else runs, beside prompts of text and while
images come one after the other; then --requests at once, with distinct images, and how many steps
and images ran by graphs. --budget-s ends these requests: their rate counts the ended ones.
"""

import asyncio
import hashlib
import random
import time

import torch

from models.config import ModelConfig
from models.config_sections.vision import VisionConfig
from models.registry import make_tower
from services.engine.patch_memory import PatchMemory
from services.engine.prompt_image import EncoderImage, PromptImage
from tests.bench.busy_start import Streams
from tests.bench.floor import MEASURED_ON, step_floor
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, make_parser
from tests.bench.tower_floor import tower_floor_ms
from tests.bench.workload import Job

NUM_TEXT_TOKENS = 32
"""Tokens of text around an image."""
WORDS = range(1000, 9000)
"""Token ids that are text in every shape."""


CAPTURE_SHARE = 0.4
"""Most of the time that is left at the start that captures may take."""
SETTLE_S = 0.5
"""Time after which a look at gaps counts them."""
ENDING_S = 5
"""Time for the end of the engine and the report."""


class Jobs:
    """Makes requests, no two of which show the same image or begin alike."""

    def __init__(self, vision: VisionConfig, side: int, memory: PatchMemory | None = None) -> None:
        self._vision = vision
        self._memory = memory
        self._grid = (side, side)
        self._draw = random.Random(1)
        self._noise = self._draw.randbytes(vision.num_patches(self._grid) * vision.patch_bytes)
        self._num_images = 0
        self.num_tokens = NUM_TEXT_TOKENS + vision.num_vectors(self._grid)

    def encoder_floor_ms(self) -> float:
        """Returns the floor of encoding an image."""
        with torch.device("meta"):
            return tower_floor_ms(make_tower(self._vision), [self._grid])

    def text(self, num_output: int) -> Job:
        """Returns a request of text, as long as those with an image."""
        return Job(self._words(self.num_tokens), num_output)

    def with_image(self, num_output: int) -> Job:
        """Returns a request with an image between two texts."""
        vision = self._vision
        self._num_images += 1
        number = self._num_images.to_bytes(8, "little")
        # Only the first pixels differ: noise of a thousand images would take longer than they do.
        parts = [number, self._noise[len(number) :]]
        digest = hashlib.sha256(number).digest()
        image = EncoderImage.joined(parts, digest=digest, grid=self._grid, memory=self._memory)
        count = vision.num_vectors(self._grid)
        half = NUM_TEXT_TOKENS // 2
        placed = PromptImage(image=image, offset=half, num_tokens=count, num_vectors=count)
        tokens = [vision.image_token_id] * count
        return Job([*self._words(half), *tokens, *self._words(half)], num_output, (placed,))

    def _words(self, count: int) -> list[int]:
        return self._draw.choices(WORDS, k=count)


def main() -> None:
    """Measures and prints a table."""
    parser = make_parser(__doc__ or "", budget_s=150)
    parser.add_argument("--side", type=int, default=64, help="patches on each side of an image")
    parser.add_argument("--requests", type=int, default=64, help="at once, each with an image")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of each of these")
    parser.add_argument("--repeats", type=int, default=5, help="of single requests")
    parser.add_argument("--streams", type=int, default=16, help="requests that decode meanwhile")
    parser.add_argument("--gaps-s", type=float, default=5, help="seconds of each look at gaps")
    parser.add_argument("--no-text", action="store_true", help="only requests with images at once")
    run_program("images", parser, _measure, defaults=PEER_SETTINGS)


async def _measure(settings: Settings, report: Report) -> None:
    arguments = settings.arguments
    async with offline_engine(settings.config) as engine:
        await _captured(engine, report, settings.budget.left_s * CAPTURE_SHARE)
        vision = engine.vision
        if vision is None:
            report.problem("the model sees no images")
            return
        jobs = Jobs(vision, arguments.side, engine.patches)
        report.content["facts"]["tokens"] = jobs.num_tokens
        floors = {"text": None, "image": None}
        if MEASURED_ON in (report.content["machine"]["gpu"] or ""):
            floors = _floors_ms(settings.model, jobs)
        await _first_tokens(engine, jobs, report, arguments.repeats, floors)
        await _gaps(engine, jobs, report, settings)
        await _together(engine, jobs, report, settings)
        report.state("graphs", engine.graph_facts())


async def _captured(engine: OfflineEngine, report: Report, limit_s: float) -> None:
    """Waits for all graphs, or reports that they take longer."""
    try:
        async with asyncio.timeout(limit_s):
            await engine.wait_until_captured()
    except TimeoutError:
        report.problem(f"captures took longer than {limit_s:.0f} s: steps were measured with fewer")


def _floors_ms(model: ModelConfig, jobs: Jobs) -> dict[str, float | None]:
    """Returns the floor of a first token of text, and of one with an image before it."""
    text_ms = step_floor(model, getattr(torch, model.dtype)).prefill_ms(jobs.num_tokens)
    return {"text": text_ms, "image": text_ms + jobs.encoder_floor_ms()}


async def _first_tokens(
    engine: OfflineEngine,
    jobs: Jobs,
    report: Report,
    repeats: int,
    floors: dict[str, float | None],
) -> None:
    """Measures the first token of a request alone, the first time not counted."""
    for name, make in (("text", jobs.text), ("image", jobs.with_image)):
        times_ms = [1000 * (await engine.generate([make(1)])).ttft_s[0] for _ in range(repeats + 1)]
        report.add(f"first token, {name}", times_ms[1:], "ms", floor=floors[name])


async def _gaps(engine: OfflineEngine, jobs: Jobs, report: Report, settings: Settings) -> None:
    """Measures the gaps between tokens of text without images and beside them."""
    arguments = settings.arguments
    streams = Streams(engine, arguments.streams, settings.max_model_len)
    for name, make in (("alone", None), ("beside text", jobs.text), ("beside", jobs.with_image)):
        begin_s, num_requests = time.perf_counter(), 0
        end_s, counted_s = begin_s + arguments.gaps_s, begin_s + SETTLE_S
        while (now_s := time.perf_counter()) < end_s or not streams.gaps_ms(counted_s, now_s):
            streams.replace_finished()
            if make is None:
                await asyncio.sleep(0.01)
            else:
                await engine.generate([make(1)])
                num_requests += 1
        gaps = sorted(streams.gaps_ms(counted_s, now_s))
        report.add(f"gaps {name}, median", [gaps[len(gaps) // 2]], "ms")
        report.add(f"gaps {name}, 99 %", [gaps[int(0.99 * len(gaps))]], "ms")
        report.add(f"gaps {name}, longest", [gaps[-1]], "ms")
        report.state(f"requests {name}", num_requests)
    await streams.end()


async def _together(engine: OfflineEngine, jobs: Jobs, report: Report, settings: Settings) -> None:
    """Measures requests that come at once."""
    arguments = settings.arguments
    kinds = [("text", jobs.text), ("image", jobs.with_image)][int(arguments.no_text) :]
    for number, (name, make) in enumerate(kinds):
        limit_s = (settings.budget.left_s - ENDING_S) / (len(kinds) - number)
        title = f"{arguments.requests} requests, {name}"
        before, runs_before = engine.graph_use(), engine.core.counters.images_by_run.copy()
        requests = [make(arguments.outputs) for _ in range(arguments.requests)]
        done = await engine.generate(requests, limit_s=max(1.0, limit_s))
        if done.num_ended < len(requests):
            report.problem(f"{title}: {done.num_ended} ended in {limit_s:.0f} s")
        if done.num_ended:
            report.add(f"{title}, time", [done.elapsed_s], "s")
            report.add(f"{title}, rate", [done.num_ended / done.elapsed_s], "/s", "higher")
        use = engine.graph_use().since(before)
        report.state(f"steps, {name}", use)
        share = use["hit_rate"]
        if isinstance(share, float):
            report.add(f"{title}, steps in graphs", [100 * share], "%", "higher")
        runs = engine.core.counters.images_by_run - runs_before
        report.state(f"images encoded, {name}", dict(runs))
        if runs:
            in_graphs = 100 * runs["graph"] / runs.total()
            report.add(f"{title}, images in graphs", [in_graphs], "%", "higher")


if __name__ == "__main__":
    main()
