"""Runs a recording's steps on both sides and compares what comes out."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from protos.engine.v1.engine_pb2 import WatchStepsResponse
from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    CUDAGraphMode,
    FallbackReason,
    StepResult,
    read_int32,
)
from services.engine.replay.cache_content import CacheContent, Slots
from services.engine.replay.compare import Deviation, deviation
from services.engine.replay.orders import Order, Orders
from services.engine.replay.recording import ReplayError
from services.engine.replay.report import StepFindings, TokenDifference, Totals
from services.engine.replay.sides import Side, Sides
from services.engine.replay.taps import OUTPUT
from services.engine.worker.step_arrays import StepArrays, StepLimits


@dataclass(frozen=True, slots=True)
class _Step:
    """A step while it is compared; slots: where its keys and values are, for each group."""

    order: Order
    arrays: StepArrays
    slots: list[Slots]


class Replayer:
    """The state of a replay between two steps.

    Both sides go on with the recorded tokens, and the tested one, after a step that differed, with
    the keys and values of the other: one difference is found once.
    """

    def __init__(
        self, sides: Sides, orders: Orders, *, limits: StepLimits, num_blocks: int
    ) -> None:
        self._sides = sides
        self._orders = orders
        self.limits = limits
        self._content = CacheContent(limits, num_blocks=num_blocks)
        self.totals = Totals()

    @torch.inference_mode()
    def restore(self, opening: BatchDescriptor, num_computed: Mapping[int, int]) -> None:
        """Brings both sides to the state that the first step builds on.

        Args:
            opening: assigns rows and blocks, and computes nothing.
            num_computed: tokens of each row whose keys and values are in its blocks.
        """
        for side in self._both:
            side.runner.update_tables(opening)
        for row, tokens in self._content.restore(opening, num_computed).items():
            self._rebuild(row, tokens)

    @torch.inference_mode()
    def replay(self, recorded: WatchStepsResponse) -> StepFindings:
        """Runs one step; if it differs, the deviations are those of every attention layer."""
        step = self._prepare(recorded.descriptor)
        results = [self._run(side, step.order) for side in self._both]
        findings = StepFindings(
            step_id=recorded.descriptor.step_id,
            shape=_shape(recorded.descriptor),
            graph_key=step.order.graph_key,
            deviations=self._cache_deviations(step) + self._output_deviations(),
            tokens=self._token_differences(step.arrays, recorded.result, *results),
        )
        if results[1].fallback_reason:
            findings.graph_key = None
            self.totals.num_given_up += 1
        if findings.differs:
            if self.totals.first_difference is None:
                self._locate(step, findings)
            self._copy_cache(np.concatenate(step.slots))
        self._set_tokens(step.arrays, recorded.result)
        self.totals.count(findings)
        return findings

    @property
    def _both(self) -> tuple[Side, Side]:
        return self._sides.reference, self._sides.tested

    def _prepare(self, descriptor: BatchDescriptor) -> _Step:
        """Makes sure that whatever a step reads from the cache is there."""
        order = self._orders.order(descriptor)
        arrays = StepArrays.read(order.reference, self.limits)
        slots = self._content.step(order.reference, arrays)
        if slots.missing:
            self._sides.reference.runner.update_tables(order.reference)
        for row, tokens in slots.missing.items():
            self._rebuild(row, tokens)
        return _Step(order, arrays, slots.written)

    def _rebuild(self, row: int, tokens: range) -> None:
        """Computes keys and values of a row's tokens, and gives them to both sides."""
        size = self.limits.max_num_batched_tokens
        for start in range(tokens.start, tokens.stop, size):
            end = min(start + size, tokens.stop)
            self._sides.reference.runner.execute(_chunk(row, start, end))
            self._copy_cache(np.concatenate(self._content.slots(row, start, end)))
        self.totals.num_rebuilt_tokens += len(tokens)

    def _run(self, side: Side, order: Order) -> StepResult:
        descriptor = order.reference if side is self._sides.reference else order.tested
        return side.runner.execute(descriptor).message()

    def _cache_deviations(self, step: _Step) -> list[Deviation]:
        """Compares the keys and values that the step wrote, layer by layer."""
        reference, tested = self._both
        found = []
        device = reference.runner.buffers.tokens.device
        group_slots = [torch.from_numpy(slots).to(device) for slots in step.slots]
        group_of_layer = {
            layer: number
            for number, group in enumerate(self.limits.cache_groups)
            for layer in group.layers
        }
        for layer, (ours, theirs) in enumerate(zip(reference.cache, tested.cache, strict=True)):
            other, slots = theirs.tensors(), group_slots[group_of_layer.get(layer, 0)]
            for name, tensor in ours.tensors().items():
                expected, actual = (each.flatten(0, 1)[slots] for each in (tensor, other[name]))
                found.append(self._deviation(f"layer {layer} {name}", expected, actual))
        return found

    def _output_deviations(self) -> list[Deviation]:
        """Compares what the last step ended with."""
        reference, tested = self._both
        assert reference.hidden is not None, "a step has run"
        assert tested.hidden is not None, "a step has run"
        found = [self._deviation("final hidden states", reference.hidden, tested.hidden)]
        if reference.logits is not None and tested.logits is not None:
            found.append(self._deviation("logits", reference.logits, tested.logits))
        return found

    def _token_differences(
        self, arrays: StepArrays, recorded: StepResult, reference: StepResult, tested: StepResult
    ) -> list[TokenDifference]:
        """Returns the tokens on which the three do not agree.

        Raises:
            ReplayError: the recording has another number of tokens than the step samples.
        """
        columns = [read_int32(each.token_ids).tolist() for each in (recorded, reference, tested)]
        rows = arrays.row_ids[arrays.sample_indices].tolist()
        if len(columns[0]) != len(rows):
            raise ReplayError(
                f"step {recorded.step_id} samples {len(rows)} tokens; "
                f"the recording has {len(columns[0])}"
            )
        logits = self._sides.reference.logits
        return [
            TokenDifference(
                row=row,
                recorded=tokens[0],
                reference=tokens[1],
                tested=tokens[2],
                margin=0.0 if logits is None else _margin(logits[index], set(tokens)),
            )
            for index, (row, *tokens) in enumerate(zip(rows, *columns, strict=True))
            if len(set(tokens)) > 1
        ]

    def _locate(self, step: _Step, findings: StepFindings) -> None:
        """Runs a step again with taps on attention; the cache takes the same values again.

        A difference that does not come again leaves the findings as they are.
        """

        def run(side: Side) -> object:
            return self._run(side, step.order)

        expected = self._sides.tap_reference(run)
        actual = self._sides.tap_tested(run, step.order.graph_key)
        num_tokens = step.arrays.num_tokens
        found = []
        for layer, name in sorted(expected, key=lambda each: (each[0], each[1] == OUTPUT)):
            label = f"layer {layer} {'attention output' if name == OUTPUT else name}"
            pair = (expected[layer, name], actual[layer, name])
            found.append(self._deviation(label, *(each[:num_tokens] for each in pair)))
        found += self._output_deviations()
        if any(each.is_excessive for each in found) or not findings.excessive:
            findings.deviations = found

    def _deviation(self, name: str, expected: torch.Tensor, actual: torch.Tensor) -> Deviation:
        return deviation(name, expected, actual, self._sides.dtype)

    def _copy_cache(self, slots: Slots) -> None:
        """Gives the tested side the other's keys and values."""
        reference, tested = self._both
        index = torch.from_numpy(slots).to(reference.runner.buffers.tokens.device)
        for ours, theirs in zip(reference.cache, tested.cache, strict=True):
            targets = theirs.tensors()
            for name, source in ours.tensors().items():
                targets[name].flatten(0, 1)[index] = source.flatten(0, 1)[index]

    def _set_tokens(self, arrays: StepArrays, result: StepResult) -> None:
        """Writes the recorded tokens behind the sequences that sampled."""
        if not len(arrays.sample_indices):
            return
        columns = (
            arrays.row_ids[arrays.sample_indices],
            arrays.seq_lens[arrays.sample_indices],
            read_int32(result.token_ids),
        )
        for side in self._both:
            device = side.runner.buffers.tokens.device
            side.runner.buffers.append_tokens(
                *(torch.from_numpy(column.copy()).to(device) for column in columns)
            )


def _chunk(row: int, start: int, end: int) -> BatchDescriptor:
    """Returns the order to compute some tokens of one row and to sample nothing."""
    builder = BatchBuilder()
    builder.row_ids.append(row)
    builder.q_lens.append(end - start)
    builder.seq_lens.append(end)
    return builder.build(
        step_id=0,
        is_prefill=True,
        graph_key=None,
        mode=CUDAGraphMode.CUDA_GRAPH_MODE_NONE,
        fallback_reason=FallbackReason.FALLBACK_REASON_ENFORCE_EAGER,
    )


def _margin(logits: torch.Tensor, token_ids: Collection[int]) -> float:
    """Returns how far apart the logits [V] of some tokens are, relative to the largest one.

    Raises:
        ReplayError: a token is not in the vocabulary.
    """
    if not all(0 <= token_id < len(logits) for token_id in token_ids):
        raise ReplayError(f"one of the tokens {sorted(token_ids)} is not among {len(logits)} ids")
    chosen = logits[list(token_ids)]
    return float((chosen.max() - chosen.min()) / logits.abs().max())


def _shape(descriptor: BatchDescriptor) -> str:
    shape = descriptor.context
    if not shape.is_prefill:
        return f"decodes of {shape.batch_size}"
    return f"prompts and decodes of {shape.batch_size}, {shape.num_tokens} tokens"
