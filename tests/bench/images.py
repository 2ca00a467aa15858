"""Prompts with images, against text of the same length.

python -m tests.bench.images --shape qwen3-vl-8b --requests 64

An image is noise of --side patches squared; with patches of 16 pixels, 64 are a megapixel.
"""

import argparse
import hashlib
import random

from models.config_sections.vision import VisionConfig
from services.engine.prompt_image import EncoderImage, PromptImage
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, make_parser
from tests.bench.workload import Job

NUM_TEXT_TOKENS = 32
"""Tokens of text around an image."""
WORDS = range(1000, 9000)
"""Token ids that are text in every shape."""


class Jobs:
    """Makes requests, no two of which show the same image or begin alike."""

    def __init__(self, vision: VisionConfig, side: int) -> None:
        self._vision = vision
        self._grid = (side, side)
        self._draw = random.Random(1)
        self.num_tokens = NUM_TEXT_TOKENS + vision.num_vectors(self._grid)

    def text(self, num_output: int) -> Job:
        """Returns a request of text, as long as those with an image."""
        return Job(self._words(self.num_tokens), num_output)

    def with_image(self, num_output: int) -> Job:
        """Returns a request with an image between two texts."""
        vision = self._vision
        patches = self._draw.randbytes(vision.num_patches(self._grid) * vision.patch_bytes)
        image = EncoderImage(
            digest=hashlib.sha256(patches).digest(), patches=patches, grid=self._grid
        )
        count = vision.num_vectors(self._grid)
        half = NUM_TEXT_TOKENS // 2
        placed = PromptImage(image=image, offset=half, num_tokens=count, num_vectors=count)
        tokens = [vision.image_token_id] * count
        return Job([*self._words(half), *tokens, *self._words(half)], num_output, (placed,))

    def _words(self, count: int) -> list[int]:
        return self._draw.choices(WORDS, k=count)


def main() -> None:
    """Measures and prints a table."""
    parser = make_parser(__doc__ or "", budget_s=120)
    parser.add_argument("--side", type=int, default=64, help="patches on each side of an image")
    parser.add_argument("--requests", type=int, default=64, help="at once, each with an image")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of each of these")
    parser.add_argument("--repeats", type=int, default=5, help="of single requests")
    run_program("images", parser, _measure, defaults=PEER_SETTINGS)


async def _measure(settings: Settings, report: Report) -> None:
    arguments = settings.arguments
    async with offline_engine(settings.config) as engine:
        await engine.wait_until_captured()
        vision = engine.vision
        if vision is None:
            report.problem("the model sees no images")
            return
        jobs = Jobs(vision, arguments.side)
        report.content["facts"]["tokens"] = jobs.num_tokens
        await _first_tokens(engine, jobs, report, arguments)
        await _together(engine, jobs, report, arguments)


async def _first_tokens(
    engine: OfflineEngine, jobs: Jobs, report: Report, arguments: argparse.Namespace
) -> None:
    """Measures the first token of a request alone, the first time not counted."""
    for name, make in (("text", jobs.text), ("image", jobs.with_image)):
        times_ms = [
            1000 * (await engine.generate([make(1)])).ttft_s[0]
            for _ in range(arguments.repeats + 1)
        ]
        report.add(f"first token, {name}", times_ms[1:], "ms")


async def _together(
    engine: OfflineEngine, jobs: Jobs, report: Report, arguments: argparse.Namespace
) -> None:
    """Measures requests that come at once."""
    count = arguments.requests
    for name, make in (("text", jobs.text), ("image", jobs.with_image)):
        before = engine.graph_use()
        done = await engine.generate([make(arguments.outputs) for _ in range(count)])
        report.add(f"{count} requests, {name}", [done.elapsed_s], "s")
        report.add(f"{count} requests, {name}, rate", [count / done.elapsed_s], "/s", "higher")
        report.content["facts"][f"steps, {name}"] = engine.graph_use().since(before)


if __name__ == "__main__":
    main()
