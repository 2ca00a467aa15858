"""Runs a recording's steps on both sides and compares the results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from models.kv_cache import RowCacheData
from models.state_cache import StateCacheData
from protos.engine.v1.engine_pb2 import WatchStepsResponse
from services.engine.batch import BatchDescriptor, GraphKind, StepResult
from services.engine.replay.cache_content import CacheContent, Slots, joined
from services.engine.replay.compare import Deviation, deviation, first_difference, margin
from services.engine.replay.image_content import ImageContent
from services.engine.replay.orders import Order, Orders
from services.engine.replay.report import StepFindings, TokenDifference, Totals
from services.engine.replay.sides import Side, Sides, StatesBefore
from services.engine.replay.taps import OUTPUT
from services.engine.replay.tokens import StepTokens, partings
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.checks import Int32Array
from services.engine.worker.runner.speculator import Speculation


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under comparison.

    slots: of its keys and values, for each group. states: [R, blocks] of its rows' states.
    """

    order: Order
    batch: Batch
    slots: list[Slots]
    states: Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The tokens and drafts of the recording and of both sides."""

    recorded: StepTokens
    reference: StepTokens
    tested: StepTokens

    @property
    def num_agreeing_drafts(self) -> int:
        """Leading drafts on which both sides agree; -1 if their tokens differ."""
        return self.reference.num_agreeing_drafts(self.tested)


class Replayer:
    """The state of a replay between two steps.

    Both sides continue with the recorded tokens. After a step that differed, the tested side also
    gets the reference's keys and values, so a difference is reported once.
    """

    def __init__(
        self, sides: Sides, orders: Orders, images: ImageContent, *, num_blocks: int
    ) -> None:
        self._sides = sides
        self._orders = orders
        self.limits = limits = images.limits
        self._num_blocks = num_blocks
        self._content = CacheContent(limits, num_blocks=num_blocks)
        self._images = images
        config = sides.reference.runner.model.config
        self._entry_layers = config.entry_layers
        self._num_layers = len(self._entry_layers)
        self.totals = Totals()

    @torch.inference_mode()
    def restore(self, opening: BatchDescriptor, num_computed: Mapping[int, int]) -> None:
        """Brings both sides to the state before the first step.

        Args:
            opening: assigns rows and blocks, and computes nothing.
            num_computed: tokens of each row with keys and values in its blocks.
        """
        for side in self._both:
            side.runner.update_tables(opening)
        self._images.assign(opening.row_assignments)
        for row, tokens in self._content.restore(opening, num_computed).items():
            self._rebuild(row, tokens)

    def lose_loaded(self, descriptor: BatchDescriptor) -> None:
        """Has steps compute what a recorded step loads before they read it."""
        self._content.lose(self._orders.loaded_blocks(descriptor))

    @torch.inference_mode()
    def replay(self, recorded: WatchStepsResponse) -> StepFindings:
        """Runs one step; if it differs, returns the deviations of every attention layer."""
        step = self._prepare(recorded.descriptor)
        before = [StatesBefore(side, step.states) for side in self._both]
        results = [self._run(side, step.order) for side in self._both]
        tokens = self._read_tokens(step.batch, recorded.result, *results)
        findings = StepFindings(
            step_id=recorded.descriptor.step_id,
            shape=_shape(recorded.descriptor),
            graph_key=step.order.graph_key,
            deviations=self._cache_deviations(step, tokens)
            + self._output_deviations(step.batch, tokens),
            tokens=self._token_differences(step.batch, tokens),
        )
        if results[1].fallback_reason:
            findings.graph_key = None
        if results[1].fallback_reason or self._lost_drafting(step, results[1]):
            self.totals.num_given_up += 1
        if findings.differs:
            if self.totals.first_difference is None:
                for states in before:
                    states.restore()
                self._locate(step, findings, tokens)
            self._copy_cache(joined(step.slots))
            self._sides.copy_blocks(step.states)
        self._set_tokens(step.batch, tokens.recorded)
        self.totals.count(findings)
        return findings

    @property
    def _both(self) -> tuple[Side, Side]:
        return self._sides.reference, self._sides.tested

    def _prepare(self, descriptor: BatchDescriptor) -> _Step:
        """Computes what a step reads from the cache and no step has written."""
        order = self._orders.order(self._images.completed(descriptor))
        batch = Batch.read(order.reference, self.limits, num_blocks=self._num_blocks)
        slots = self._content.step(batch)
        if slots.missing:
            self._sides.reference.runner.update_tables(order.reference)
        for row, tokens in slots.missing.items():
            self._rebuild(row, tokens)
        if slots.copies.size:
            self._sides.reference.runner.forward.copy_states(torch.from_numpy(slots.copies))
            self._sides.copy_blocks(slots.copies[1])
        return _Step(order, batch, slots.written, slots.states)

    def _rebuild(self, row: int, tokens: range) -> None:
        """Computes a row's tokens for both sides."""
        for chunk, (start, end) in self._images.chunks(row, tokens):
            self._sides.compute(chunk)
            self._copy_cache(joined(self._content.slots(row, start, end)))
            self._sides.copy_blocks(self._content.state_blocks(row))
        self.totals.num_rebuilt_tokens += len(tokens)

    def _run(self, side: Side, order: Order) -> StepResult:
        return side.run([order.reference] if side is self._sides.reference else order.tested)

    def _cache_deviations(self, step: _Step, tokens: _Tokens) -> list[Deviation]:
        """Compares the keys and values written by the step, by layer."""
        reference, tested = self._both
        found = []
        device = reference.runner.buffers.tokens.device
        group_slots = [torch.from_numpy(slots).to(device) for slots in step.slots]
        known = torch.from_numpy(tokens.reference.known_query_tokens(step.batch)).to(device)
        group_of_layer = {
            layer: number
            for number, group in enumerate(self.limits.layer_groups)
            for layer in group.layers
        }
        for layer, (ours, theirs) in enumerate(zip(reference.cache, tested.cache, strict=True)):
            if layer - self._num_layers > tokens.num_agreeing_drafts:
                break
            if isinstance(ours, StateCacheData):
                found += self._state_deviations(layer, step.batch)
                continue
            if isinstance(ours, RowCacheData) and ours.rate > 1:
                continue  # made of rows that another layer caches and the step's inputs
            other, slots = theirs.tensors(), group_slots[group_of_layer.get(layer, 0)]
            stride = getattr(theirs, "block_stride", 1)
            block_size = self.limits.block_size
            slots = slots + slots // block_size * block_size * (stride - 1)
            rows = _query_rows(step.batch)
            if layer >= self._num_layers:
                slots, rows = slots[known], rows[known.cpu().numpy()]
            for name, tensor in ours.tensors().items():
                expected, actual = (each.flatten(0, 1)[slots] for each in (tensor, other[name]))
                label = f"{self._place(layer)} {name}"
                found.append(self._deviation(label, expected, actual, rows))
        return found

    def _state_deviations(self, entry: int, batch: Batch) -> list[Deviation]:
        """Compares the states of a layer after the step's last tokens."""
        found = []
        by_side = [side.states_after(entry, batch) for side in self._both]
        for name, expected, actual in zip(("state", "convolution"), *by_side, strict=True):
            if expected.numel():
                label = f"{self._place(entry)} {name}"
                found.append(self._deviation(label, expected, actual, batch.row_ids))
        return found

    def _output_deviations(self, batch: Batch, tokens: _Tokens) -> list[Deviation]:
        """Compares the step's outputs, and drafts with the same inputs."""
        reference, tested = self._both
        assert reference.hidden is not None, "a step has run"
        assert tested.hidden is not None, "a step has run"
        hidden = (reference.hidden, tested.hidden)
        found = [self._deviation("final hidden states", *hidden, _query_rows(batch))]
        if reference.logits is not None and tested.logits is not None:
            logits = (reference.logits, tested.logits)
            found.append(self._deviation("logits", *logits, self._sampled_rows(batch)))
        pairs = zip(reference.draft_hidden, tested.draft_hidden, strict=True)
        found += [
            self._deviation(f"draft {1 + depth} hidden states", *pair)
            for depth, pair in enumerate(pairs)
            if depth <= tokens.num_agreeing_drafts
        ]
        return found

    def _read_tokens(
        self, batch: Batch, recorded: StepResult, reference: StepResult, tested: StepResult
    ) -> _Tokens:
        num_drafts = self.limits.num_worker_drafts
        return _Tokens(
            recorded=StepTokens.recorded(recorded, batch, num_drafts),
            reference=StepTokens.read(reference, num_drafts),
            tested=StepTokens.read(tested, num_drafts),
        )

    def _token_differences(self, batch: Batch, tokens: _Tokens) -> list[TokenDifference]:
        """Returns differing tokens and drafts of the recording and the two sides.

        Drafts depend on all earlier inputs of the draft layers. After a difference, or after tokens
        were computed again, the recorded drafts do not count.
        """
        rows = batch.row_ids[batch.sample_indices].tolist()
        recorded, reference, tested = tokens.recorded, tokens.reference, tokens.tested
        logits, num_places = self._sides.reference.logits, self.limits.decode_q_len
        found = [
            TokenDifference(
                name=f"token {1 + place}" if place else "token",
                row=rows[index],
                recorded=values[0],
                reference=values[1],
                tested=values[2],
                margin=0.0
                if logits is None
                else margin(logits[index * num_places + place], values),
            )
            for index, place, values in partings(recorded.tokens, reference.tokens, tested.tokens)
        ]
        if found:
            return found
        drafts = [reference.drafts, tested.drafts]
        if not (self.totals.num_rebuilt_tokens or self.totals.num_different):
            drafts.insert(0, recorded.drafts)
        return [
            TokenDifference(
                name=f"draft {1 + place}",
                row=rows[index],
                recorded=values[0] if len(values) > 2 else None,
                reference=values[-2],
                tested=values[-1],
                margin=margin(self._draft_logits(index, place), values),
            )
            for index, place, values in partings(*drafts)
        ]

    def _draft_logits(self, index: int, depth: int) -> torch.Tensor:
        """Returns the reference's logits [V] of one draft of one row."""
        reference = self._sides.reference
        speculator = reference.runner.speculator
        assert isinstance(speculator, Speculation), "it made drafts"
        assert speculator.layers is not None, "it made drafts"
        hidden = reference.draft_hidden[depth][index : index + 1]
        return speculator.layers.compute_logits(hidden, depth)[0]

    def _lost_drafting(self, step: _Step, tested: StepResult) -> bool:
        """Whether a graph should have drafted and did not."""
        key, batch = step.order.graph_key, step.batch
        return (
            key is not None
            and key.kind == GraphKind.GRAPH_KIND_DECODE
            and self.limits.num_speculative_tokens > 0
            and len(batch.sample_indices) == len(batch.row_ids)
            and batch.drafts is not None
            and batch.drafts.num_next == key.max_q_len - 1
            and not tested.drafted_by_graph
        )

    def _locate(self, step: _Step, findings: StepFindings, tokens: _Tokens) -> None:
        """Runs a step again with taps on attention; the cache receives the same values.

        If the difference does not recur, the findings stay as they are.
        """

        def run(side: Side) -> object:
            return self._run(side, step.order)

        expected = self._sides.tap_reference(run)
        if self._sides.is_exact:
            actual = self._sides.tap_rows(step.order.tested)
        else:
            actual = self._sides.tap_tested(run, step.order.graph_key)
        known = tokens.reference.known_query_tokens(step.batch)
        found: list[tuple[int, int, Deviation]] = []
        for tap in sorted(expected, key=lambda tap: (*tap[:2], tap[2] == OUTPUT)):
            number, layer, name = tap
            depth = self._draft_depth(number, layer)
            if depth > tokens.num_agreeing_drafts:
                continue
            place = f"draft {1 + depth}" if number else self._place(layer)
            label = f"{place} {'attention output' if name == OUTPUT else name}"
            # After the tokens of the step there may be padding.
            pair = expected[tap], actual[tap][: len(expected[tap])]
            if number == 1:
                pair = pair[0][known], pair[1][known]
            rows = None if number else _query_rows(step.batch)
            found.append((number, layer, self._deviation(label, *pair, rows)))
        for entry, cache in enumerate(self._sides.reference.cache):
            if isinstance(cache, StateCacheData):
                states = self._state_deviations(entry, step.batch)
                found += [(0, entry, each) for each in states]
        deviations = [each for *_, each in sorted(found, key=lambda each: each[:2])]
        deviations += self._output_deviations(step.batch, tokens)
        if any(each.is_excessive for each in deviations) or not findings.excessive:
            findings.deviations = deviations

    def _place(self, layer: int) -> str:
        """Returns the name of a cache layer."""
        draft = layer - self._num_layers
        return f"layer {self._entry_layers[layer]}" if draft < 0 else f"draft {1 + draft}"

    def _draft_depth(self, number: int, layer: int) -> int:
        """Returns how many drafts precede a pass's draft in a layer; -1 for the model's layers.

        The first pass goes through all draft layers, as far as drafts are wanted.
        """
        if not number:
            return -1
        num_layers = len(self._sides.reference.cache) - self._num_layers
        num_whole = min(num_layers, self.limits.num_speculative_tokens)
        return layer - self._num_layers if number == 1 else num_whole + number - 2

    def _deviation(
        self,
        name: str,
        expected: torch.Tensor,
        actual: torch.Tensor,
        rows: Int32Array | None = None,
    ) -> Deviation:
        """Compares two tensors; where every bit counts, it names the first row that differs.

        rows: [n], the row of each entry of the tensors.
        """
        found = deviation(name, expected, actual, self._sides.dtype)
        if not self._sides.is_exact or found.is_exact:
            return found
        if rows is not None:
            name = f"row {rows[first_difference(expected, actual)]}, {name}"
        return replace(found, name=name, tolerance=0.0)

    def _sampled_rows(self, batch: Batch) -> Int32Array:
        """Returns the row of each row of logits."""
        rows = batch.row_ids[batch.sample_indices]
        return np.repeat(rows, 1 if batch.drafts is None else batch.drafts.row_ids.shape[1])

    def _copy_cache(self, slots: Slots) -> None:
        """Copies the reference's keys and values to the tested side."""
        reference, tested = self._both
        index = torch.from_numpy(slots).to(reference.runner.buffers.tokens.device)
        for ours, theirs in zip(reference.cache, tested.cache, strict=True):
            if isinstance(ours, StateCacheData):
                continue
            targets = theirs.tensors()
            for name, source in ours.tensors().items():
                targets[name].flatten(0, 1)[index] = source.flatten(0, 1)[index]

    def _set_tokens(self, batch: Batch, tokens: StepTokens) -> None:
        """Appends the recorded tokens to the rows that sampled."""
        if not len(batch.sample_indices):
            return
        counts = [len(each) for each in tokens.tokens]
        first = batch.seq_lens[batch.sample_indices]
        if batch.drafts is not None:
            first = batch.drafts.positions[:, 0]
        columns = (
            np.repeat(batch.row_ids[batch.sample_indices], counts),
            np.concatenate([at + np.arange(n) for at, n in zip(first, counts, strict=True)]),
            np.concatenate(tokens.tokens),
        )
        for side in self._both:
            device = side.runner.buffers.tokens.device
            side.runner.buffers.append_tokens(
                *(torch.from_numpy(column.astype(np.int32)).to(device) for column in columns)
            )


def _query_rows(batch: Batch) -> Int32Array:
    """Returns the row of each query token."""
    return np.repeat(batch.row_ids, np.diff(batch.query_start_loc))


def _shape(descriptor: BatchDescriptor) -> str:
    shape = descriptor.context
    if not shape.is_prefill:
        return f"decodes of {shape.batch_size}"
    return f"prompts and decodes of {shape.batch_size}, {shape.num_tokens} tokens"
