"""Times whole decode steps of requests with one beginning, with and without reading it once.

Random weights, scheduler and ModelRunner in one process, whole graphs, two steps in flight. The
lines of a point alternate: "on" shares prefixes as the tables of the GPU say, "off" shares none.
Where nothing is shared, both run the same graphs, and differ in what the scheduler looks for.
"""

import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from services.engine.scheduler.shared_prefixes import SharedPrefixFinder
from services.engine.worker.start.kv_memory import shared_prefix_tokens
from tests.bench.model_folder import make_model_folder
from tests.bench.report import Report
from tests.bench.steady_decode import SteadyDecode
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine

SESSIONS = (128, 48, 32, 8)
"""The most first: what fewer of them share is cached then."""
SHARED = (16000, 3008)
OWN = 256
UNSHARED = 1024
"""Tokens of each request where nothing is shared."""
STEPS = 20
ROUNDS = 3
"""Times that each way is measured, STEPS steps each."""
BLOCK_SIZE = 16
DTYPES = {"bf16": torch.bfloat16, "fp8": FP8_CACHE_DTYPE}


def make_engine(folder: Path, model: CausalLM, dtype: torch.dtype, least_saved: int) -> GraphEngine:
    """Returns an engine with graphs of the measured steps; least_saved: see pays."""
    grown = num_outputs()
    num_tokens = sum(SHARED) + max(SESSIONS) * (len(SHARED) * OWN + UNSHARED + 3 * grown)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=sorted(SESSIONS)
    )
    engine = GraphEngine(
        folder,
        config,
        device=next(model.parameters()).device.type,
        dtype=model.dtype,
        cache_dtype=dtype,
        max_num_seqs=max(SESSIONS),
        max_num_batched_tokens=8192,
        max_model_len=max(SHARED) + OWN + grown,
        num_blocks=num_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        model=model,
        shared_prefix_tokens=least_saved,
    )
    engine.capture_sharing()
    return engine


def measure(report: Report, name: str, engine: GraphEngine, prompts: list[list[int]]) -> None:
    """Adds the milliseconds of a step with and without sharing."""
    scheduler, limits = engine.scheduler, engine.limits
    finder = partial(SharedPrefixFinder, dispatcher=engine.ledger.dispatcher)
    finders = {"off": finder(replace(limits, shared_prefix_tokens=0)), "on": finder(limits)}
    vocab_size = engine.model.config.vocab_size
    engine.run(prompts[:1], 1)  # the others find what it computed
    decode = SteadyDecode(engine, len(prompts), num_outputs(), vocab_size, prompts=prompts)
    times: dict[str, list[float]] = {way: [] for way in finders}
    shares = False
    for round_ in range(ROUNDS + 1):
        for way, each in finders.items():
            scheduler._prefixes = each  # the engine and its graphs stay the same
            decode.drain()
            decode.step()
            started_s = time.perf_counter()
            for _ in range(STEPS):
                decode.step()
            elapsed_ms = 1000 * (time.perf_counter() - started_s) / STEPS
            if round_:  # the first one warms up
                times[way].append(elapsed_ms)
            if way == "on":
                shares = decode.descriptor.graph_key.shares_prefixes
    decode.drain()
    decode.end()
    for way, found in times.items():
        report.add(f"{name} {way}", found, "ms")
    ratio = median(times["on"]) / median(times["off"])
    report.note(f"{name}: on / off {ratio:.3f}, {'shared' if shares else 'not shared'}")


def measure_steps(report: Report, shape: str, device: str) -> None:
    """Measures all points."""
    with TemporaryDirectory(prefix="octavo-bench-") as parent:
        folder = make_model_folder(shape, Path(parent))
        model = load_model(
            folder, device=torch.device(device), dtype=torch.bfloat16, load_format="dummy"
        )
        for kind, dtype in DTYPES.items():
            least = shared_prefix_tokens(
                None, model.cache_specs(), dtype=dtype, device=torch.device(device)
            )
            engine = make_engine(folder, model, dtype, least)
            for shared in SHARED:
                for count in SESSIONS:
                    prompts = prompts_of(count, shared, OWN, model.config.vocab_size)
                    measure(report, f"{kind} {count} x {shared}", engine, prompts)
            for count in SESSIONS:
                prompts = prompts_of(count, 0, UNSHARED, model.config.vocab_size)
                measure(report, f"{kind} {count}, nothing shared", engine, prompts)
            del engine
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


def num_outputs() -> int:
    """Returns the tokens that each request makes at most."""
    return 2 * (ROUNDS + 1) * (STEPS + 4)


def prompts_of(count: int, num_shared: int, num_own: int, vocab_size: int) -> list[list[int]]:
    """Returns prompts with the same first tokens; those of fewer requests are among them."""
    drawn = torch.Generator().manual_seed(num_shared)
    system = torch.randint(vocab_size, (num_shared,), generator=drawn).tolist()
    own = torch.randint(vocab_size, (max(SESSIONS), num_own), generator=drawn)
    return [[*system, *each] for each in own[:count].tolist()]
