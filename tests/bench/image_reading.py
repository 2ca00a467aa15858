"""Images a second and core that helper processes read: `python -m tests.bench.image_reading`.

The base is the processor time of decoding one image and resizing it with Pillow, which is the least
that any frontend spends. `share` is the measured rate over the rate of that time on all cores;
`CPU share` is that time over the processor time of an image here, which is what `share` would be on
cores that nothing else uses. With --streams, images also go through a whole frontend to a stand-in
engine, while as many requests of text decode; their longest gap is printed beside the rate.
"""

import argparse
import asyncio
import io
import os
import time

import psutil
import uvloop
from PIL import Image

from services.frontend.images.reader import ImageReader
from tests.bench.image_serving import WARM_UP_IMAGES, distinct_files, served
from tests.support.image_files import encoded, picture
from tests.support.image_settings import settings_text

WIDTH, HEIGHT = 1152, 896
BEAT_S = 0.005


def base_cpu_s(data: bytes, rounds: int) -> float:
    """Returns the least processor time of decoding an image and resizing it."""
    times = []
    for _ in range(rounds):
        started = time.process_time()
        image = Image.open(io.BytesIO(data)).convert("RGB")
        image.resize((WIDTH - 4, HEIGHT), Image.Resampling.BICUBIC)
        times.append(time.process_time() - started)
    return min(times)


async def longest_gap_s(stop: asyncio.Event) -> float:
    """Returns the longest time that the event loop did not run other work."""
    longest = 0.0
    while not stop.is_set():
        started = time.perf_counter()
        await asyncio.sleep(BEAT_S)
        longest = max(longest, time.perf_counter() - started - BEAT_S)
    return longest


def cpu_s() -> tuple[float, float]:
    """Returns the processor time of this process and of its helpers until now."""
    spent = [child.cpu_times() for child in psutil.Process().children()]
    return time.process_time(), sum(each.user + each.system for each in spent)


async def measure(kind: str, data: bytes, args: argparse.Namespace) -> list[str]:
    """Returns a row: format, base, rate, both shares, processor times and longest gap."""
    num_cores = len(os.sched_getaffinity(0))
    base_s = base_cpu_s(data, args.rounds)
    reader = ImageReader(
        "qwen_vl",
        settings_text("qwen_vl", max_pixels=16384 * 28 * 28),
        image_token_id=0,
        max_patches=65536,
        num_processes=num_cores,
    )
    await asyncio.gather(*(reader.read(data) for _ in range(2 * num_cores)))
    before, started = cpu_s(), time.perf_counter()
    stop = asyncio.Event()
    gap = asyncio.create_task(longest_gap_s(stop))
    await asyncio.gather(*(reader.read(data) for _ in range(args.images)))
    rate = args.images / (time.perf_counter() - started)
    own_ms, helpers_ms = (
        1e3 * (now - then) / args.images for now, then in zip(cpu_s(), before, strict=True)
    )
    stop.set()
    gap_ms = 1e3 * await gap
    await reader.close()
    share = rate / (num_cores / base_s)
    cpu_share = 1e3 * base_s / (own_ms + helpers_ms)
    figures = (1e3 * base_s, rate, share, cpu_share, own_ms, helpers_ms, gap_ms)
    return [kind, *(f"{figure:.3g}" for figure in figures)]


async def run(args: argparse.Namespace) -> None:
    """Prints a table in Markdown."""
    columns = ("format", "decode and resize, CPU ms", "images/s", "share", "CPU share", "CPU ms")
    print(f"| {' | '.join(columns)} | helpers | gap, ms |")
    print(f"|{' --- |' * (len(columns) + 2)}")
    image = picture(WIDTH, HEIGHT)
    for kind in args.formats:
        print(f"| {' | '.join(await measure(kind, encoded(image, kind), args))} |", flush=True)
    if not args.streams:
        return
    print("| format, served | images/s | share | longest gap of streams, ms |")
    print("| --- | --- | --- | --- |")
    num_cores = len(os.sched_getaffinity(0))
    for kind in args.formats:
        files = distinct_files(image.convert("RGB"), kind, args.images + WARM_UP_IMAGES)
        base_s = base_cpu_s(files[0], args.rounds)
        rate, gap_s = await served(files, args.streams, at_once=4 * num_cores)
        figures = (rate, rate / (num_cores / base_s), 1e3 * gap_s)
        print(f"| {kind} | {' | '.join(f'{each:.3g}' for each in figures)} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=0, help="of text, beside served images")
    parser.add_argument("--formats", nargs="*", default=["JPEG", "PNG", "WEBP"])
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
