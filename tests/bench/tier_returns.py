"""Prefixes that come back from lower tiers: `python -m tests.bench.tier_returns --shape qwen3-8b`.

    python -m tests.bench.tier_returns --shape qwen3-8b --length 16000 [engine flags]

Documents follow each other until the first have left the GPU. Then the time to the first token of
one is measured: computed, from the host's memory, and, after the engine was started again, from a
folder on disk, beside the floors: bytes over the speed of a large copy, or of reading the files one
after the other. Decodes run beside returns and beside nothing. Files that were read before are
dropped from the system's cache where the program may do so.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from services.engine.config.engine_config import EngineConfig
from tests.bench.busy_start import Streams
from tests.bench.offline_engine import OfflineEngine, offline_engine
from tests.bench.program import run_program
from tests.bench.report import Report
from tests.bench.settings import PEER_SETTINGS, Settings, make_parser
from tests.bench.workload import Job, fitted, fixed_jobs

ROUNDS = 3
BLOCK_SIZE = 16
QUIET_S = 2.0
"""Time in which decodes run beside nothing."""
IDLE_DISK_S = 10.0
"""Time without a block from a disk that has written all."""
PIECE_BYTES = 2**20


def tiered(settings: Settings, folder: str, *, has_disk: bool) -> EngineConfig:
    """Returns the engine's settings with tiers and a cache for two documents and the decodes."""
    arguments = settings.arguments
    changes: dict[str, object] = {
        "enable_prefix_caching": True,
        "num_kv_blocks": num_blocks(settings),
        "host_kv_gb": arguments.host_gb,
    }
    if has_disk:
        changes |= {"disk_kv_dir": Path(folder), "disk_kv_gb": arguments.disk_gb}
    return settings.config.with_flags(**changes)


def num_blocks(settings: Settings) -> int:
    """Returns the blocks of two documents and of the decodes."""
    arguments = settings.arguments
    return int(2 * (arguments.length // BLOCK_SIZE + 2) + arguments.decodes * 64 + 8)


def documents(settings: Settings) -> Iterator[Job]:
    """Yields documents without end, none of which begins like another."""
    seed = 1
    while True:
        jobs = fixed_jobs(1, settings.arguments.length, 1, seed=seed)
        [job] = fitted(jobs, vocab_size=settings.model.vocab_size, max_model_len=2**30)
        yield job
        seed += 1


async def first_token_s(engine: OfflineEngine, job: Job) -> float:
    """Returns the time to a document's first token."""
    [elapsed_s] = (await engine.generate([job])).ttft_s
    return elapsed_s


async def measure(settings: Settings, report: Report) -> None:
    """Measures both tiers, or the host's memory without a disk."""
    with TemporaryDirectory(prefix="octavo-tiers-") as folder:
        source = documents(settings)
        count = num_blocks(settings) // (settings.arguments.length // BLOCK_SIZE) + 2
        kept = [next(source) for _ in range(count)]
        has_disk = not settings.arguments.without_disk
        async with offline_engine(tiered(settings, folder, has_disk=has_disk)) as engine:
            await engine.wait_until_captured()
            await first_token_s(engine, next(source))
            computed = [await first_token_s(engine, job) for job in kept]
            report.add("computed, first token", [1000 * each for each in computed], "ms")
            returned = [await first_token_s(engine, job) for _ in range(ROUNDS) for job in kept]
            report.add("from host memory, first token", [1000 * each for each in returned], "ms")
            state_hits(report, engine, "host", ROUNDS * count, settings)
            report.state("share of computing, host", share(returned, computed))
            host_floor(report, engine, settings)
            await beside_decodes(settings, report, engine, kept)
            if has_disk:
                await wait_for_disk(engine)
        if has_disk:
            await measure_disk(settings, report, Path(folder), next(source), kept, computed)


async def measure_disk(
    settings: Settings,
    report: Report,
    folder: Path,
    first: Job,
    kept: list[Job],
    computed: list[float],
) -> None:
    """Measures documents that an engine before has left on disk; first: another document."""
    drop_system_cache(folder)
    async with offline_engine(tiered(settings, str(folder), has_disk=True)) as engine:
        await engine.wait_until_captured()
        await first_token_s(engine, first)
        read = [await first_token_s(engine, job) for job in kept]
        report.add("from disk, first token", [1000 * each for each in read], "ms")
        state_hits(report, engine, "disk", len(kept), settings)
        report.state("share of computing, disk", share(read, computed))
        speed = document_bytes(engine, settings) / median(read) / 1e9
        report.add("from disk, all until the first token", [speed], "GB/s", "higher")
    drop_system_cache(folder)
    alone = reading_speed(folder)
    report.add("reading the files one after the other", [alone], "GB/s", "higher")
    report.state("share of the reading speed, disk", round(speed / alone, 3))


def share(found: list[float], computed: list[float]) -> float:
    """Returns the median time as a share of that of computing."""
    return round(median(found) / median(computed), 4)


def state_hits(
    report: Report, engine: OfflineEngine, tier: str, num_requests: int, settings: Settings
) -> None:
    """States the share of prompt tokens that came from a tier; a problem if it is small."""
    counts = engine.core.counters.scheduler.tiers
    hits = counts.disk_hit_tokens if tier == "disk" else counts.hit_tokens
    found = hits / (num_requests * settings.arguments.length)
    report.state(f"share of tokens from {tier}", round(found, 3))
    if found < 0.5:
        report.problem(f"{found:.0%} of the tokens came from {tier}: others were computed again")


def document_bytes(engine: OfflineEngine, settings: Settings) -> int:
    """Returns what the blocks of a document have, in bytes."""
    return int(settings.arguments.length // BLOCK_SIZE * engine.core.stats().worker.block_bytes)


def host_floor(report: Report, engine: OfflineEngine, settings: Settings) -> None:
    """Reports the time of one large copy with as many bytes, where there is a GPU."""
    tiers = engine.core.counters.scheduler.tiers
    num_bytes = document_bytes(engine, settings)
    report.state("bytes of a document", num_bytes)
    report.state("seconds of copies", round(tiers.copy_s, 4))
    if not torch.cuda.is_available():
        return
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    report.add("one copy of as many bytes", [1000 * each for each in times[1:]], "ms")


async def beside_decodes(
    settings: Settings, report: Report, engine: OfflineEngine, kept: list[Job]
) -> None:
    """Reports gaps between tokens of decodes alone, and while documents come back."""
    if not settings.arguments.decodes:
        return
    streams = Streams(engine, settings.arguments.decodes, 1000)
    await first_token_s(engine, kept[0])
    begin_s = time.perf_counter()
    quiet_s = await streams.watch(begin_s, QUIET_S)
    for job in kept:
        streams.replace_finished()
        await first_token_s(engine, job)
    end_s = time.perf_counter()
    for name, period in (
        ("decodes alone", (begin_s, quiet_s)),
        ("decodes beside returns", (quiet_s, end_s)),
    ):
        report.add(f"{name}, gap", streams.gaps_ms(*period), "ms")
    await streams.end()


async def wait_for_disk(engine: OfflineEngine) -> None:
    """Returns when no block is being written any more.

    A block that the host has stored once more is not written once more: it is not waited for long.
    """
    tiers, last, last_s = engine.core.counters.scheduler.tiers, -1, 0.0
    while (done := tiers.num_written + tiers.num_drops) < tiers.num_stored:
        if done != last:
            last, last_s = done, time.perf_counter()
        elif time.perf_counter() > last_s + IDLE_DISK_S:
            return
        await first_token_s(engine, Job([9] * BLOCK_SIZE, 200))


def drop_system_cache(folder: Path) -> None:
    """Has the next reading come from the device, where the system lets the program."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def reading_speed(folder: Path) -> float:
    """Returns the speed of reading all files one after the other, in GB/s."""
    num_bytes, begin_s = 0, time.perf_counter()
    for path in sorted(folder.rglob("*.block")):
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                num_bytes += len(piece)
    return num_bytes / (time.perf_counter() - begin_s) / 1e9


def main() -> None:
    """Reads the command line and measures."""
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=int, default=16000, help="tokens of a document")
    parser.add_argument("--host-gb", type=float, default=24.0, help="memory on the host")
    parser.add_argument("--disk-gb", type=float, default=24.0, help="memory on disk")
    parser.add_argument("--without-disk", action="store_true", help="only the host's memory")
    parser.add_argument("--decodes", type=int, default=16, help="requests beside returns")
    run_program("tier_returns", parser, measure, defaults=PEER_SETTINGS)


if __name__ == "__main__":
    main()
