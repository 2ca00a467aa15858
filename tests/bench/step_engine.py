"""Scheduler and ModelRunner in one process, set by a command line, and traces of their steps."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from services.engine.config.compilation import CompilationConfig
from services.engine.worker.start.device import choose_cache_dtype, choose_dtype
from tests.bench.settings import Settings
from tests.support.graph_engine import GraphEngine


def chosen_device(settings: Settings) -> str:
    """Returns "cuda" or "cpu"."""
    device = settings.config.worker.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def make_engine(
    settings: Settings,
    device: str,
    *,
    compilation: CompilationConfig | None = None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_blocks: int,
    num_states: int = 0,
) -> GraphEngine:
    """Returns scheduler and runner; no graph is captured yet.

    compilation: other settings than the command line's. num_states: requests whose states fit
    beside the blocks.
    """
    config = settings.config
    dtype = choose_dtype(config.checkpoint, settings.model, torch.device(device))
    return GraphEngine(
        config.checkpoint.model,
        compilation or config.compilation,
        device=device,
        dtype=dtype,
        cache_dtype=choose_cache_dtype(config.cache, dtype, torch.device(device)),
        load_format=config.checkpoint.load_format,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_states=num_states,
        block_size=config.cache.block_size,
    )


def traced_events(run: Callable[[], None], device: str) -> list[dict]:
    """Calls `run` under the profiler; returns the events of the Chrome trace."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    with TemporaryDirectory(prefix="octavo-bench-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]
