"""Runs steps: from a descriptor to sampled tokens."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.cudagraph_mode import GraphKind
from models.deepseek_mtp import DeepseekMTP
from models.draft_model import SmallModel
from models.eagle3 import Eagle3, Eagle3Head
from models.gemma4_assistant import AssistantLayers, Gemma4Assistant
from models.kv_cache import CacheData
from models.layers.decoder import CausalLM
from models.parallel.intermediate_tensors import IntermediateTensors
from services.engine.batch import BatchDescriptor, EncoderRun, FallbackReason
from services.engine.compilation.graphs.piece_wrapper import PieceGraphs
from services.engine.limits import StepLimits
from services.engine.worker.graphs.drafter import DraftModel
from services.engine.worker.graphs.graph_family import GraphFamily
from services.engine.worker.graphs.graph_set import GraphSet
from services.engine.worker.graphs.step_pieces import StepPieces
from services.engine.worker.graphs.step_programs import DecodeProgram, MixedProgram
from services.engine.worker.graphs.whole_graphs import GraphProgram, WholeGraphs
from services.engine.worker.inputs.batch import (
    Batch,
    read_assignments,
    read_block_writes,
)
from services.engine.worker.inputs.dummy_steps import idle_batch
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.image_inputs import ImageInputs
from services.engine.worker.inputs.input_buffers import Header, InputBuffers
from services.engine.worker.inputs.transfer import to_device
from services.engine.worker.runner.adapter_store import AdapterStore
from services.engine.worker.runner.expert_placer import ExpertPlacer
from services.engine.worker.runner.image_encoder import ImageEncoder
from services.engine.worker.runner.outputs import ForwardOutput
from services.engine.worker.runner.pending_result import PendingCopies, PendingResult
from services.engine.worker.runner.speculator import NoSpeculation, Speculation, Speculator
from services.engine.worker.runner.step_pooler import StepPooler
from services.engine.worker.runner.step_sampler import NoSampling, StepSampler
from services.engine.worker.tiers.host_memory import HostMemory, copy_blocks

_FOLLOWED = FallbackReason.FALLBACK_REASON_UNSPECIFIED

OutputWatcher = Callable[[Tensor, Tensor | None], None]
"""Takes a step's hidden states, [T, hidden], and this rank's logits of its n samples."""


class ModelRunner:
    """A model, its KV cache and the rows of running requests.

    Steps run in the order of calls. On CUDA `execute` only queues work: a step may be queued while
    earlier ones run, and reads their sampled tokens.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache_data: list[CacheData],
        *,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        """Starts without graphs.

        Args:
            model: with draft layers if the limits have draft tokens.
            kv_cache_data: each layer's cache.
            limits: the worker's.
            device: of the model and the cache.
        """
        self.model = model
        self.device = device
        self.kv_cache_data = kv_cache_data
        self.host: HostMemory | None = None
        """Keeps blocks that leave the cache; None without such memory."""
        self.buffers = InputBuffers(limits, device)
        num_own = len(model.cache_specs())
        self.forward = ForwardPass(
            model,
            kv_cache_data[:num_own],
            block_table=self.buffers.block_table,
            block_size=limits.block_size,
            groups=limits.layer_groups,
            state_pages=limits.state_pages,
            num_state_slots=limits.num_state_slots,
            prefixes=self.buffers.prefixes,
        )
        self.forward.dp_metadata = self.buffers.dp_metadata
        self.forward.draft_dp_metadata = self.buffers.draft_dp_metadata
        self._handed = IntermediateTensors(
            model.stage,
            max_num_tokens=limits.max_num_batched_tokens,
            hidden_size=model.config.stream_size,
            dtype=model.dtype,
            device=device,
        )
        self.forward.received = self._handed.received
        self.forward.sees_later = model.config.sees_later
        self._limits = limits
        self.encoder: ImageEncoder | None = None
        """Encodes images, on the first stage of a model that sees some."""
        if model.config.vision is not None:
            self._see_images(model)
        self.speculator: Speculator = NoSpeculation()
        if limits.num_speculative_tokens:
            self.speculator = self._speculation(kv_cache_data[num_own:])
        self._num_blocks = kv_cache_data[0].num_blocks
        self._graphs = GraphSet()
        self._sampler: StepSampler | StepPooler | NoSampling = NoSampling()
        if model.stage.is_last and model.pooling is not None:
            self._sampler = StepPooler(model, model.pooling, limits=limits, device=device)
        elif model.stage.is_last:
            self._sampler = StepSampler(self.buffers, model, limits=limits, device=device)
        self._on_outputs: OutputWatcher = lambda hidden, logits: None
        self.adapters: AdapterStore | None = None
        """Reads and loads adapters, of a model with room for some."""
        if model.num_adapter_slots:
            self.adapters = AdapterStore(model, device, num_ranks=limits.num_adapter_ranks)
            self.forward.adapters = self.buffers.adapters
        self.experts = ExpertPlacer(model, self.adapters)

    def _see_images(self, model: CausalLM) -> None:
        vision, tower = model.config.vision, model.visual
        self.forward.images = images = ImageInputs(
            model.config,
            self._limits,
            num_features=vision.num_features if vision is not None and tower is not None else 0,
            dtype=model.dtype,
            device=self.device,
        )
        if tower is not None:
            self.encoder = ImageEncoder(tower, images, self._limits)

    def _speculation(self, draft_caches: list[CacheData]) -> Speculation:
        """Returns the work on drafts of a small model, of draft layers or of the scheduler.

        draft_caches: of the layers of the small model or head, if there is one.
        """
        model, limits, forward = self.model, self._limits, self.forward
        layers: DraftModel | None = None
        small = next(iter(model.draft_models), None)
        if isinstance(small, AssistantLayers):
            layers = Gemma4Assistant(small, model)
        elif small is not None:
            forward = ForwardPass(
                small,
                draft_caches,
                # All layers of a request have the same tokens; those of the first group see most.
                block_table=self.buffers.block_table[
                    :, : limits.token_table_width : max(1, limits.num_groups)
                ],
                block_size=limits.block_size,
            )
            if isinstance(small, Eagle3Head):
                layers = Eagle3(small)
                forward.images = self.forward.images
            else:
                layers = SmallModel(cast("CausalLM", small))
        elif limits.num_worker_drafts:
            layers = DeepseekMTP(model)
        return Speculation(model, layers, forward, self.buffers, limits=limits)

    def graph_families(self, pieces: PieceGraphs) -> dict[GraphKind, GraphFamily]:
        """Returns the families that capture and replay graphs of this runner's steps, by kind.

        Args:
            pieces: the model's; their recorder records all graphs.
        """
        parts, limits = (self.forward, self.buffers), self._limits
        programs: dict[GraphKind, GraphProgram] = {
            GraphKind.DECODE: DecodeProgram(self.model, *parts, limits=limits),
            GraphKind.MIXED: MixedProgram(*parts, limits=limits),
            **self.speculator.programs,
        }
        return {
            GraphKind.PIECEWISE: StepPieces(*parts, pieces, limits=limits),
            **{kind: WholeGraphs(each, pieces.recorder) for kind, each in programs.items()},
        }

    @property
    def model_inputs(self) -> tuple[Tensor, Tensor]:
        """The memory of the model's inputs, of the longest step."""
        input_ids, positions = self.buffers.model_inputs
        received = self.forward.received
        return input_ids if received is None else received, positions

    def use_graphs(self, graphs: GraphSet) -> None:
        """Lets steps order these graphs."""
        self._graphs = graphs

    def watch_outputs(self, watcher: OutputWatcher) -> None:
        """Passes each step's output, valid until the next step, to `watcher`."""
        self._on_outputs = watcher

    @torch.inference_mode()
    def update_tables(self, descriptor: BatchDescriptor) -> None:
        """Assigns the rows of a step and updates its block tables, without computing it.

        Raises:
            ValueError: an assignment or an update is inconsistent or exceeds the worker's limits.
        """
        assignments = read_assignments(descriptor, self._limits)
        block_writes = read_block_writes(descriptor, self._limits, num_blocks=self._num_blocks)
        self.buffers.write_tables(assignments, block_writes)
        if self.forward.images is not None:
            self.forward.images.assign(assignments)
        self._sampler.assign(assignments)

    @torch.inference_mode()
    def execute(self, descriptor: BatchDescriptor) -> PendingResult | PendingCopies:
        """Runs one step, or on CUDA queues it.

        Raises:
            ValueError: the descriptor is inconsistent or exceeds the worker's limits.
        """
        started_ns = time.perf_counter_ns()
        copy_us = copy_blocks(descriptor, self.host, num_blocks=self._num_blocks)
        if not descriptor.context.batch_size and not descriptor.HasField("dp_metadata"):
            return PendingCopies(descriptor.step_id, copy_us)
        batch = self._read(descriptor)
        if self.adapters is not None:
            self.adapters.load(descriptor.adapter_loads)
        self._graphs.require_planned(batch)
        header = self.buffers.write(batch, batch.graph_key)
        if self.buffers.adapters is not None:
            batch = replace(batch, has_adapters=self.buffers.adapters.has_any(batch))
        encoder_run = self._take_images(batch)
        for copies in (batch.saved_states, batch.restored_states):
            if copies is not None:
                self.forward.copy_states(to_device(copies, self.device))
        num_padded = 0 if batch.graph_key is None else batch.graph_key.num_tokens
        self._handed.receive(batch.num_tokens, num_padded=num_padded)
        output = self._run(batch, header)
        self._sampler.assign(batch.assignments)  # while the device computes
        sampled = self._sampler.sample(batch, output)
        self._on_outputs(output.hidden, output.logits)
        if not self.model.stage.is_last:
            self._handed.send(output.hidden)
        # Drafting may overwrite a graph's outputs.
        drafted = self.speculator.draft(batch, output, sampled, self._graphs)
        return PendingResult.begin(
            batch.step_id,
            sampled,
            drafted,
            started_ns=started_ns,
            fallback_reason=output.fallback_reason,
            block_copy_us=copy_us,
            encoder_run=encoder_run,
        )

    def _take_images(self, batch: Batch) -> EncoderRun | None:
        """Encodes the images of a step and writes what its tokens take from them."""
        images = self.forward.images
        if images is None:
            return None
        images.assign(batch.assignments)
        run = None if self.encoder is None else self.encoder.encode(batch.encoded_images)
        images.write(batch)
        return run

    def _read(self, descriptor: BatchDescriptor) -> Batch:
        limits = self._limits
        if limits.data_parallel_size > 1 and not descriptor.context.batch_size:
            return idle_batch(descriptor, limits)
        return Batch.read(descriptor, limits, num_blocks=self._num_blocks)

    def _run(self, batch: Batch, header: Header) -> ForwardOutput:
        key, reason = batch.graph_key, _FOLLOWED
        outputs = None if key is None else self._graphs.replay(key, batch)
        chosen: list[Tensor] = []
        if outputs is not None:
            hidden, *chosen = (each[: batch.num_tokens] for each in outputs)
        else:
            hidden = self._run_without_graph(batch)
            if key is None:
                self._graphs.note_missed(batch)
            else:
                reason = FallbackReason.FALLBACK_REASON_QUARANTINED
        logits = token_ids = None
        if len(batch.sample_indices) and isinstance(self._sampler, StepSampler):
            index = self._sampled_tokens(batch, header)
            if index is not None:
                chosen = [each.index_select(0, index) for each in chosen]
            if chosen:
                logits, token_ids = chosen
            else:
                slots = self.forward.slots()
                if index is None:
                    logits = self.model.local_logits(hidden, slots)
                else:
                    slots = None if slots is None else slots.index_select(0, index)
                    logits = self.model.local_logits(hidden.index_select(0, index), slots)
        return ForwardOutput(
            header=header,
            hidden=hidden,
            logits=logits,
            token_ids=token_ids,
            fallback_reason=reason,
        )

    def _run_without_graph(self, batch: Batch) -> Tensor:
        """Returns the hidden states of a step's tokens; data-parallel ranks pad to the same rows.

        A graph that this rank has given up decides the rows all the same: others may replay it.
        """
        if batch.num_tokens_across_dp is None:
            return self.forward(self.buffers.gather_batch(batch))
        key = batch.graph_key
        num_rows = batch.num_rows if key is None else key.num_tokens
        inputs = self.buffers.gather_batch(batch, num_tokens=num_rows)
        return self.forward(inputs)[: batch.num_tokens]

    def _sampled_tokens(self, batch: Batch, header: Header) -> Tensor | None:
        """Returns the query tokens after which the step samples, [n]; None for all."""
        num_sampling, num_tokens = len(batch.sample_indices), batch.num_tokens
        if batch.drafts is not None:
            indices = batch.drafts.token_indices.ravel()
            if np.array_equal(indices, np.arange(num_tokens)):
                return None
            return to_device(indices, self.device)
        if num_sampling == num_tokens:
            return None
        if len(batch.row_ids) == num_tokens:
            return header.sample_indices
        return header.query_start_loc[1:].index_select(0, header.sample_indices) - 1
