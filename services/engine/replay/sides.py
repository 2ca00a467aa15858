"""The two runners of a replay over one model, and their graphs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.kv_cache import CacheData
from models.state_cache import StateCacheData, pages_after, read_conv, read_recurrent
from protos.engine.v1.batch_pb2 import AdapterLoad
from services.engine.batch import BatchDescriptor, GraphKey, StepResult, read_int32
from services.engine.compilation.graphs.capture_plan import (
    full_decode_key,
    graph_support,
    piecewise_key,
    read_key,
    wire_key,
)
from services.engine.config.compilation import CompilationConfig
from services.engine.config.images import PAGE_VECTORS
from services.engine.replay.orders import INVARIANT
from services.engine.replay.recording import ReplayError
from services.engine.replay.report import describe_graph
from services.engine.replay.rows_alone import joined
from services.engine.replay.taps import AttentionTaps, Tap
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.runner.adapter_store import AdapterStore
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.speculator import Speculation
from services.engine.worker.start.graph_setup import (
    PreparedGraphs,
    attention_support,
    configured_keys,
    install_model,
    piece_graphs,
    prepare_graphs,
)
from services.engine.worker.start.loaded_model import LoadedModel

Tapped = dict[Tap, Tensor]
"""Tensors of attention for a step's tokens and padding."""


@dataclass(slots=True)
class Side:
    """A runner with its own KV cache.

    hidden: [T, hidden], the last step's result. logits: [S, V] of the rows that sampled.
    draft_hidden: [S, hidden] for each draft after them, which chose it.
    """

    name: str
    runner: ModelRunner
    hidden: Tensor | None = None
    logits: Tensor | None = None
    draft_hidden: tuple[Tensor, ...] = ()

    def run(
        self, steps: Sequence[BatchDescriptor], after_each: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Runs a step, or the steps of its rows; keeps the outputs of all rows."""
        results, outputs = [], []
        for step in steps:
            results.append(self.runner.execute(step).message())
            outputs.append((self.hidden, self.logits, self.draft_hidden))
            after_each()
        if len(steps) == 1:
            return results[0]
        hidden, logits, drafts = zip(*outputs, strict=True)
        self.hidden, self.logits = _joined(hidden), _joined(logits)
        self.draft_hidden = tuple(
            torch.cat(each) for each in zip(*filter(None, drafts), strict=True)
        )
        return joined(results)

    @property
    def cache(self) -> list[CacheData]:
        """Each layer's cache."""
        return self.runner.forward.kv_cache_data

    def states_after(self, entry: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the states of a step's rows in a cache entry, and the inputs of its convolution.

        They are those after the rows' last tokens: [R, heads, rows, columns] and [R, width - 1,
        channels].
        """
        cache = self.cache[entry]
        assert isinstance(cache, StateCacheData), f"entry {entry} keeps no state"
        device = self.runner.buffers.tokens.device
        rows, ends = (
            torch.from_numpy(each.astype(np.int64)).to(device)
            for each in (batch.row_ids, batch.seq_lens)
        )
        pages = pages_after(cache, self.runner.forward.state_table(entry)[rows], ends)
        recurrent = read_recurrent(cache, pages) if cache.spec.num_heads else pages[:, :0]
        return recurrent, read_conv(cache, pages)

    def __post_init__(self) -> None:
        self.runner.watch_outputs(self._keep)
        if isinstance(self.runner.speculator, Speculation):
            self.runner.speculator.on_drafts = self._keep_drafts

    def _keep(self, hidden: Tensor, logits: Tensor | None) -> None:
        # A graph that drafts may use the memory.
        self.hidden, self.logits = hidden.clone(), None if logits is None else logits.clone()

    def _keep_drafts(self, hidden: tuple[Tensor, ...]) -> None:
        self.draft_hidden = hidden


class StatesBefore:
    """The states of a step's rows before it, as a step changes them in place."""

    def __init__(self, side: Side, blocks: npt.NDArray[np.int64]) -> None:
        """Copies blocks; they may be none."""
        self._blocks = torch.from_numpy(blocks.ravel())
        self._memory = side.runner.forward.state_memory
        self._content = [memory[:, self._blocks] for memory in self._memory]

    def restore(self) -> None:
        """Makes the states what they were."""
        for memory, content in zip(self._memory, self._content, strict=True):
            memory[:, self._blocks] = content


def _joined(outputs: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the outputs of several steps as one, [n, ...]; None if no step has any."""
    found = [output for output in outputs if output is not None]
    return torch.cat(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of the sides.

    against: "eager", "invariant", "piecewise" or "full". loaded: the model, with the limits of the
    recorded engine.
    """

    against: str
    loaded: LoadedModel

    @property
    def mode(self) -> CUDAGraphMode:
        """The graphs to capture; whole steps with prompts only if supported."""
        if self.against in ("eager", INVARIANT):
            return CUDAGraphMode.NONE
        if self.against == "piecewise":
            return CUDAGraphMode.PIECEWISE
        loaded = self.loaded
        support = graph_support(
            attention_support(loaded.model, loaded.device, loaded.cache_dtype),
            loaded.config.compilation.level,
            decode_q_len=loaded.limits.decode_q_len,
            on_cpu=loaded.device.type == "cpu",
        )
        return CUDAGraphMode.FULL if support.prompts else CUDAGraphMode.FULL_DECODE_ONLY

    @property
    def compilation(self) -> CompilationConfig:
        """Compilation and capture of the side with graphs."""
        settings = self.loaded.config.compilation
        return settings.model_copy(
            update={
                "enforce_eager": False,
                "compilation_level": settings.level,
                "cudagraph_mode": self.mode.name.lower(),
            }
        )

    def catalogue(self) -> list[GraphKey]:
        """Returns the graphs of an engine with these flags, in wire form."""
        keys = configured_keys(self.mode, self.compilation, self.loaded.limits)
        return list(map(wire_key, keys))

    def allows(self, key: GraphKey) -> bool:
        """Whether a recorded graph has the right kind and fits the limits."""
        limits, own = self.loaded.limits, read_key(key)
        if own.shares_prefixes:
            if not limits.shared_prefix_tokens or own.kind is GraphKind.PIECEWISE:
                return False
            own = replace(own, shares_prefixes=False)
        if own.skips_adapters:
            if not limits.num_adapter_slots or own.kind is GraphKind.PIECEWISE:
                return False
            own = replace(own, skips_adapters=False)
        is_decode = own.kind is GraphKind.DECODE
        wanted = self.mode.decode_mode() if is_decode else self.mode.mixed_mode()
        if own.kind.runtime_mode is not wanted:
            return False
        if own.num_tokens not in range(1, limits.max_num_batched_tokens + 1):
            return False
        if is_decode:
            is_of_plan = own == full_decode_key(own.graph_bs, own.max_q_len)
            is_of_plan = is_of_plan and own.max_q_len - 1 in limits.draft_lengths
            return is_of_plan and own.graph_bs in range(1, limits.max_decodes + 1)
        if own.kind is GraphKind.PIECEWISE:
            return own == piecewise_key(own.num_tokens)
        is_mixed = own.kind is GraphKind.MIXED and own.max_q_len == own.num_tokens
        return is_mixed and own.graph_bs in range(1, limits.max_num_seqs + 1)


class Sides:
    """A model without graphs, and the same weights compiled and with graphs."""

    def __init__(
        self,
        settings: ReplaySettings,
        *,
        num_blocks: int,
        graph_keys: Sequence[GraphKey],
    ) -> None:
        """Compiles, allocates and captures everything.

        Args:
            settings: of the sides.
            num_blocks: blocks of each cache.
            graph_keys: the graphs that the steps need, all of the tested kind.

        Raises:
            ReplayError: graphs of that kind cannot be captured.
        """
        loaded = settings.loaded
        self.dtype = loaded.dtype
        self.is_exact = settings.against == INVARIANT
        """Whether every bit counts, and rows are named."""
        self._settings = settings
        self._pieces = piece_graphs(loaded.device, loaded.dtype)
        compiled = loaded.compile(settings.compilation, self._pieces)
        self.reference = Side("eager", loaded.make_runner(num_blocks, loaded.model))
        names = {"eager": "repeated", INVARIANT: "alone"}
        tested_name = names.get(settings.against, settings.against)
        self.tested = Side(tested_name, loaded.make_runner(num_blocks))
        install_model(self.tested.runner, compiled, settings.compilation, self._pieces)
        self._prepared = self._prepare(graph_keys)
        if self._prepared.mode is not settings.mode:
            raise ReplayError(
                f"no graphs for --against {settings.against} can be captured here: this device "
                "or --compilation-level does not allow it"
            )
        outcomes = self._prepared.capture_all(lambda _: None)
        self.faults = [
            f"{describe_graph(outcome.key)} failed its test: {outcome.fault}"
            for outcome in outcomes
            if outcome.fault
        ]
        """Graphs that failed their test; their steps run without."""

    def read_adapters(self, folders: Iterable[Path]) -> frozenset[bytes]:
        """Reads adapters for both sides and returns their digests.

        Raises:
            ReplayError: something is wrong with one.
        """
        try:
            return frozenset(
                store.read(folder) for folder in folders for store in self._adapter_stores
            )
        except ValueError as error:
            raise ReplayError(str(error)) from error

    def load_adapters(self, loads: Sequence[AdapterLoad]) -> None:
        """Copies adapters into slots, before a step or anything that its cache lacks."""
        for store in self._adapter_stores:
            store.load(loads)

    @property
    def _adapter_stores(self) -> list[AdapterStore]:
        runners = self.reference.runner, self.tested.runner
        return [each.adapters for each in runners if each.adapters is not None]

    def compute(self, chunk: BatchDescriptor) -> None:
        """Computes keys and values of a row's tokens on the reference side.

        Images that other steps read stay encoded.
        """
        images = self.reference.runner.forward.images
        vectors = kept = None
        if images is not None and chunk.encoded_images:
            num_pages = max(len(read_int32(each.pages)) for each in chunk.encoded_images)
            vectors = images.rows[: num_pages * PAGE_VECTORS]
            kept = vectors.clone()
        self.reference.runner.execute(chunk)
        if vectors is not None and kept is not None:
            vectors.copy_(kept)

    def copy_blocks(self, blocks: npt.NDArray[np.int64]) -> None:
        """Copies blocks of states from the reference to the tested side."""
        index = torch.from_numpy(blocks.ravel())
        sides = (self.reference.runner.forward, self.tested.runner.forward)
        for ours, theirs in zip(*(each.state_memory for each in sides), strict=True):
            theirs[:, index] = ours[:, index]

    def tap_reference(self, run: Callable[[Side], object]) -> Tapped:
        """Runs a step without graphs and returns the tensors of attention."""
        with AttentionTaps() as taps:
            run(self.reference)
        return taps.tensors

    def tap_tested(self, run: Callable[[Side], object], key: GraphKey | None) -> Tapped:
        """Runs a step on the tested side and returns the tensors of attention.

        A graph of a whole step is captured again with the copies inside. Attention between graphs
        of pieces is tapped directly.
        """
        with AttentionTaps() as taps:
            if key is not None and read_key(key).kind is not GraphKind.PIECEWISE:
                self._prepare([key]).capture_all(lambda _: None)
            run(self.tested)
        self.tested.runner.use_graphs(self._prepared.graphs)
        return taps.tensors

    def tap_rows(self, steps: Sequence[BatchDescriptor]) -> Tapped:
        """Runs the steps of a step's rows on the tested side; returns the tensors of all rows."""
        tapped: list[Tapped] = []
        with AttentionTaps() as taps:

            def keep() -> None:
                tapped.append(dict(taps.tensors))
                taps.tensors.clear()

            self.tested.run(steps, keep)
        return {tap: torch.cat([tensors[tap] for tensors in tapped]) for tap in tapped[0]}

    def _prepare(self, keys: Sequence[GraphKey]) -> PreparedGraphs:
        """Plans graphs of exactly these keys."""
        return prepare_graphs(
            self.tested.runner,
            self._settings.compilation,
            limits=self._settings.loaded.limits,
            pieces=self._pieces,
            on_fault=lambda _: None,
            # Graphs of decodes come first, and of each kind large ones.
            keys=sorted(
                map(read_key, keys), key=lambda key: (key.kind, -key.num_tokens, -key.graph_bs)
            ),
        )
