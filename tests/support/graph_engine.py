"""A real scheduler and a real ModelRunner in one process, with graphs."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from models.config_sections.pooling import PoolingConfig
from models.layers.adapter_room import make_room
from models.layers.decoder import CausalLM
from models.loading.draft_model import load_draft_model
from models.loading.loader import load_model
from protos.engine.v1.worker_pb2 import WorkerReady
from services.engine.adapter import Adapter
from services.engine.batch import BatchDescriptor, Float32Array, StepResult, read_float32
from services.engine.compilation.graphs.capture_plan import wire_key
from services.engine.config.compilation import CompilationConfig
from services.engine.core.graph_ledger import GraphLedger
from services.engine.kv_cache.cache_groups import LayerGroup, group_layers
from services.engine.kv_cache.host_tier import HostLimits
from services.engine.limits import StepLimits
from services.engine.prompt_image import PromptImage
from services.engine.request import Request, SamplingParams
from services.engine.scheduler.scheduler import Scheduler
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start.graph_setup import (
    graph_report,
    install_model,
    piece_graphs,
    prepare_graphs,
)
from services.engine.worker.start.kv_memory import allocate_kv_cache, state_pages
from services.engine.worker.tiers.block_memory import BlockMemory
from services.engine.worker.tiers.host_memory import PlainHostMemory
from services.engine.worker.tiers.pinned_memory import PinnedHostMemory
from tests.support.compiled_models import compile_model
from tests.support.engine_harness import RecordingSink
from tests.support.requests import make_request


class GraphEngine:
    """Schedules and runs requests with the graphs captured so far.

    num_states: requests whose states fit beside the blocks. sent: the steps as they were ordered,
    by id. steps: completed, with results.
    """

    def __init__(
        self,
        folder: Path,
        config: CompilationConfig,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        has_groups: bool = True,
        load_format: str = "safetensors",
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 64,
        num_blocks: int = 64,
        num_states: int = 0,
        block_size: int = 4,
        num_speculative_tokens: int = 0,
        min_speculative_tokens: int | None = None,
        lookup_sizes: tuple[int, int] | None = None,
        draft_model: Path | None = None,
        num_encoder_pages: int = 0,
        max_encoder_tokens: int = 64,
        model: CausalLM | None = None,
        pooling: PoolingConfig | None = None,
        max_in_flight: int = 2,
        num_host_slots: int = 0,
        max_step_loads: int = 16,
        shared_prefix_tokens: int = 0,
        adapters: Sequence[Path] = (),
        num_adapter_slots: int = 2,
    ) -> None:
        target = torch.device(device)
        level = int(config.level_on(target.type))
        config = config.model_copy(update={"compilation_level": level})
        with_draft_layers = num_speculative_tokens > 0 and not (lookup_sizes or draft_model)
        self.model = model or load_model(
            folder,
            device=target,
            dtype=dtype,
            load_format=load_format,
            with_draft_layers=with_draft_layers,
            sees_images=num_encoder_pages > 0,
            pooling=pooling,
        )
        if adapters and not self.model.num_adapter_slots:
            has_experts = self.model.config.moe is not None
            make_room(self.model, num_slots=num_adapter_slots, max_rank=8, with_experts=has_experts)
        if draft_model is not None:
            small = load_draft_model(
                draft_model, self.model, device=target, dtype=dtype, max_positions=max_model_len
            )
            self.model.draft_models = (small,)
        groups: tuple[LayerGroup, ...] = ()
        if has_groups:
            # A given model may have draft layers that no step runs.
            plain = self.model.config.entry_windows(with_draft_layers=False)
            windows = self.model.config.entry_windows(
                with_draft_layers=len(self.model.cache_specs()) > len(plain)
            )
            spans = self.model.config.cache_spans
            groups = group_layers(windows, max_model_len=max_model_len, spans=spans)
        self.limits = limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=self.model.config.vocab_size,
            layer_groups=groups,
            state_pages=state_pages(self.model, block_size=block_size, dtype=cache_dtype or dtype),
            num_speculative_tokens=num_speculative_tokens,
            min_speculative_tokens=min_speculative_tokens,
            lookup_sizes=lookup_sizes,
            has_draft_model=draft_model is not None,
            num_encoder_pages=num_encoder_pages,
            max_encoder_tokens=max_encoder_tokens,
            max_whole_tokens=self.model.config.max_whole_tokens,
            computes_whole_prompts=self.model.config.sees_later,
            pooling=None if pooling is None else pooling.method,
            shared_prefix_tokens=shared_prefix_tokens,
            num_adapter_slots=getattr(self.model, "num_adapter_slots", 0),
        )
        num_blocks += num_states * limits.num_state_blocks
        pieces = piece_graphs(target, dtype)
        compiled = compile_model(
            self.model,
            config,
            example_inputs=[
                torch.zeros(8, dtype=kind, device=target) for kind in (torch.int32, torch.int64)
            ],
            max_num_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            piece_wrapper=pieces.wrap,
        )
        self.cache = allocate_kv_cache(
            self.model,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=cache_dtype or dtype,
            device=target,
            groups=groups,
            num_state_slots=limits.num_state_slots,
        )
        self.runner = ModelRunner(self.model, self.cache, limits=limits, device=target)
        self.digests: dict[Path | None, bytes] = {}
        if self.runner.adapters is not None:
            self.digests = {each: self.runner.adapters.read(each) for each in adapters}
        install_model(self.runner, compiled, config, pieces)
        self.faults = []
        self.prepared = prepare_graphs(
            self.runner,
            config,
            limits=limits,
            pieces=pieces,
            on_fault=self._take_fault,
        )
        ready = WorkerReady(
            planned_graphs=map(wire_key, self.prepared.graphs.planned),
            cudagraph_mode=str(self.prepared.mode),
        )
        self.ledger = GraphLedger(ready, allows_padding=config.cudagraph_padding)
        host = None
        if num_host_slots:
            sizes = {"num_slots": num_host_slots, "max_step_loads": max_step_loads}
            host = HostLimits(**sizes)
            kind = PinnedHostMemory if target.type == "cuda" else PlainHostMemory
            self.runner.host = kind(BlockMemory(self.cache), **sizes)
        self.scheduler = Scheduler(
            limits, num_blocks=num_blocks, dispatcher=self.ledger.dispatcher, host=host
        )
        self.max_in_flight = max_in_flight
        self.sent: dict[int, BatchDescriptor] = {}
        self.steps: list[tuple[BatchDescriptor, StepResult]] = []
        self.reasons: list[int] = []
        self.finished_s: list[float] = []

    def capture(self, num_graphs: int = 1000) -> list:
        """Captures up to `num_graphs` of the remaining graphs; returns the outcome of each."""
        outcomes = []
        while self.prepared.graphs.num_pending and len(outcomes) < num_graphs:
            outcome = self.prepared.graphs.capture_slice()
            if outcome is not None:
                outcomes.append(outcome)
                self.ledger.take(graph_report(outcome))
        return outcomes

    def capture_sharing(self) -> list:
        """Captures the graphs of steps that share prefixes, too, as if such steps had run."""
        for key in self.prepared.graphs.on_demand:
            self.prepared.graphs.want(key)
        return self.capture()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        adapters: Sequence[Path | None] = (),
        **sampling: object,
    ) -> list[list[int]]:
        """Generates for all prompts at once, each with its images and its adapter's folder.

        Returns their outputs.
        """
        requests = []
        for index, prompt in enumerate(prompts):
            params = {"temperature": 0.0, "seed": index, "max_tokens": num_output} | sampling
            request = Request(
                request_id=f"request-{len(self.steps)}-{index}",
                handle=index,
                prompt_token_ids=list(prompt),
                images=tuple(images[index]) if images else (),
                adapter=self._adapter(adapters[index]) if adapters else None,
                sampling=SamplingParams(**params),
                sink=RecordingSink(),
                arrival_s=0.0,
            )
            requests.append(request)
        self._complete(requests)
        return [request.token_ids[request.num_prompt_tokens :] for request in requests]

    def embed(self, prompts: Sequence[Sequence[int]]) -> Float32Array:
        """Returns the vectors of prompts that arrive together, [n, size]."""
        requests = [make_request(list(prompt), max_tokens=1) for prompt in prompts]
        self._complete(requests)
        return np.stack([read_float32(each.sink.outputs[-1].vector) for each in requests])

    def _adapter(self, folder: Path | None) -> Adapter | None:
        if folder is None:
            return None
        digest = self.digests[folder]
        return Adapter(name=folder.name, path=str(folder), digest=digest, rank=8, num_bytes=0)

    def _complete(self, requests: Sequence[Request]) -> None:
        """Runs steps until requests that arrive together have ended."""
        for request in requests:
            self.scheduler.add(request)
        in_flight = deque()
        while self.scheduler.has_work or in_flight:
            while len(in_flight) < self.max_in_flight:
                step = self.scheduler.schedule()
                if step is None:
                    break
                wire = BatchDescriptor.FromString(step.descriptor.SerializeToString())
                self.sent[step.step_id] = wire
                in_flight.append((step, self.runner.execute(wire)))
            step, pending = in_flight.popleft()
            result = pending.message()
            for output in self.scheduler.update(step, result):
                output.request.sink.put(output)
            self.finished_s.append(time.perf_counter())
            self.steps.append((step.descriptor, result))
            self.reasons.append(self.ledger.count(step.descriptor, result))

    def _take_fault(self, outcome) -> None:
        self.faults.append(outcome)
        self.ledger.take(graph_report(outcome))
