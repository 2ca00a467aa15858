"""A core with real worker processes, of one rank or several."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.config import ModelConfig
from models.config_sections.pooling import read_pooling
from services.engine.batch import Float32Array, read_float32
from services.engine.config.engine_config import EngineConfig
from services.engine.core.engine_core import EngineCore
from services.engine.limits import StepLimits
from services.engine.patch_memory import PatchMemory
from services.engine.prompt_image import PromptImage
from services.engine.request import Request, SamplingParams
from services.engine.worker.executor import WorkerExecutor
from services.engine.worker.rank_process import WorkerDiedError
from services.engine.worker.remote_ranks import JoinedNodes
from tests.support.engine_harness import RecordingSink
from tests.support.forked_workers import workers_forked
from tests.support.waiting import until

PATCH_BYTES = 2**20


def ranks_config(folder: Path, **changes: Any) -> EngineConfig:
    """Returns a small engine on a CPU."""
    values = {
        "model": folder,
        "device": "cpu",
        "histogram_dir": "",
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "log_level": "warning",
    }
    return EngineConfig.from_flags(**{**values, **changes})


class RanksCore:
    """A running core and the requests of a test."""

    def __init__(self, core: EngineCore, executors: list[WorkerExecutor]) -> None:
        self.core = core
        self.executors = executors
        """One for each start of the workers."""
        self.patches: PatchMemory | None = None
        """Where the workers read patches; None with several hosts."""
        self._num_requests = 0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        images: Sequence[PromptImage] = (),
        adapter: str = "",
    ) -> RecordingSink:
        """Submits a request and returns what collects its tokens."""
        sink = RecordingSink()
        self._num_requests += 1
        request = Request(
            request_id=f"request-{self._num_requests}",
            handle=self._num_requests,
            prompt_token_ids=list(prompt),
            images=tuple(images),
            adapter=self.core.adapters.find(adapter) if adapter else None,
            sampling=sampling,
            sink=sink,
            arrival_s=0.0,
            deadline_s=None,
        )
        self.core.submit(request)
        return sink

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        images: Sequence[Sequence[PromptImage]] | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[list[int]]:
        """Returns the tokens of requests that run together, each with its images and adapter."""
        shown = images or [()] * len(prompts)
        names = adapters or [""] * len(prompts)
        sinks = [
            self.submit(prompt, sampling, own, name)
            for prompt, own, name in zip(prompts, shown, names, strict=True)
        ]
        for sink in sinks:
            last = await sink.wait_for_end()
            assert last.error is None, last.error
        return [sink.token_ids for sink in sinks]

    async def embed(self, prompts: Sequence[Sequence[int]]) -> Float32Array:
        """Returns the vectors of prompts that arrive together, [n, size]."""
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=1)
        sinks = [self.submit(prompt, sampling) for prompt in prompts]
        last = [await sink.wait_for_end() for sink in sinks]
        assert not [each.error for each in last if each.error is not None]
        return np.stack([read_float32(each.vector) for each in last])

    async def wait_until_ready(self) -> None:
        """Returns when the core takes requests."""
        await until(lambda: self.core.is_ready, timeout_s=120)


@asynccontextmanager
async def ranks_core(
    config: EngineConfig, nodes: JoinedNodes | None = None
) -> AsyncIterator[RanksCore]:
    """Runs a core with the worker processes that the configuration asks for.

    Args:
        config: the engine's.
        nodes: other hosts that join; None where there is one host.
    """
    sees_images = not config.images.language_model_only
    model = ModelConfig.from_folder(config.checkpoint.model, sees_images=sees_images)
    pooling = read_pooling(config.checkpoint.model, config.checkpoint.task)
    limits = StepLimits.of(
        config,
        max_model_len=config.checkpoint.max_model_len or model.max_position_embeddings,
        vocab_size=model.vocab_size,
        cache_windows=model.entry_windows(
            with_draft_layers=config.speculation.num_layer_drafts > 0
        ),
        sees_images=model.vision is not None,
        max_whole_tokens=model.max_whole_tokens,
        computes_whole_prompts=model.sees_later,
        pooling=None if pooling is None else pooling.method,
    )
    executors: list[WorkerExecutor] = []
    patches = PatchMemory.create(PATCH_BYTES) if nodes is None else None

    def make_executor() -> WorkerExecutor:
        executors.append(WorkerExecutor(config, nodes, patches))
        return executors[-1]

    core = EngineCore(
        config, limits=limits, make_executor=make_executor, on_readiness=lambda is_ready: None
    )
    with _forked_on_cpu(config):
        async with _running(core, executors) as ranks:
            ranks.patches = patches
            yield ranks


async def start_error(config: EngineConfig, nodes: JoinedNodes | None = None) -> str:
    """Returns why ranks do not start; none is left behind."""
    executor = WorkerExecutor(config, nodes)
    with _forked_on_cpu(config), pytest.raises(WorkerDiedError) as caught:
        await executor.start()
    assert executor.pid is None
    return str(caught.value)


def _forked_on_cpu(config: EngineConfig) -> AbstractContextManager[None]:
    # Libraries of a GPU read the worker's environment when they are loaded.
    return workers_forked() if config.worker.device == "cpu" else nullcontext()


@asynccontextmanager
async def _running(core: EngineCore, executors: list[WorkerExecutor]) -> AsyncIterator[RanksCore]:
    running = asyncio.create_task(core.run())
    try:
        ranks = RanksCore(core, executors)
        ready = asyncio.create_task(ranks.wait_until_ready())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            ready.cancel()
            running.result()
        await ready
        yield ranks
    finally:
        running.cancel()
        await asyncio.wait({running})
