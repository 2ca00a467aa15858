"""Drives a ModelRunner step by step, as a scheduler would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from models.layers.decoder import CausalLM
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup
from services.engine.batch import (
    BatchBuilder,
    BatchDescriptor,
    FallbackReason,
    StepResult,
    read_int32,
    row_assignment,
)
from services.engine.limits import StepLimits
from services.engine.request import SamplingParams
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.runner.pending_result import PendingResult
from services.engine.worker.start.kv_memory import allocate_kv_cache
from tests.support.random_checkpoints import SHAPE, transformers_logits

VOCAB_SIZE = SHAPE["vocab_size"]
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1000)


def greedy_continuation(model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Returns the greedy output of a transformers model, by full forward passes."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(transformers_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def greedy_continuations(
    model, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Returns what `greedy_continuation` does for each prompt, for the price of the longest.

    Nothing that a causal model computes depends on the padding after a prompt.
    """
    ends = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(ends.max()) + num_tokens, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows = torch.arange(len(prompts))
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(tokens[:, : int(ends.max())]).logits
        tokens[rows, ends] = logits[rows, ends - 1].float().argmax(dim=1)
        ends += 1
    return [
        row[len(prompt) : len(prompt) + num_tokens].tolist()
        for row, prompt in zip(tokens, prompts, strict=True)
    ]


@dataclass
class DrivenSequence:
    """One request as the driver sees it; `num_tokens` counts sampled tokens not yet known too."""

    row: int
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    num_tokens: int
    num_computed: int = 0
    is_assigned: bool = False
    block_ids: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


@dataclass
class Launched:
    """A step that was executed and the sequences that sampled in it."""

    pending: PendingResult
    sampling: list[DrivenSequence]


class StepDriver:
    """Builds descriptors for sequences and runs them; hands out rows and blocks in odd order."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        data_parallel_size: int = 1,
        prepare: Callable[[CausalLM], object] = id,
    ) -> None:
        target = torch.device(device)
        group = ParallelGroup(data_parallel_size=data_parallel_size)
        model = load_model(folder, device=target, dtype=dtype, group=group)
        prepare(model)
        self.model = model
        limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=model.config.vocab_size,
            data_parallel_size=data_parallel_size,
        )
        self.kv_cache_data = allocate_kv_cache(
            model, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=target
        )
        self.runner = ModelRunner(model, self.kv_cache_data, limits=limits, device=target)
        self.block_size = block_size
        self.free_blocks = list(range(1, num_blocks, 2)) + list(range(2, num_blocks, 2))
        self.free_rows = list(range(max_num_seqs))
        self.step_id = 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> DrivenSequence:
        """Takes a request and gives it a row."""
        return DrivenSequence(
            row=self.free_rows.pop(),
            token_ids=list(prompt),
            num_prompt=len(prompt),
            sampling=sampling,
            num_tokens=len(prompt),
        )

    def preempt(self, sequence: DrivenSequence) -> None:
        """Takes a request's blocks and row; its next step starts over on another row."""
        self.free_blocks += sequence.block_ids
        self.free_rows.insert(0, sequence.row)
        sequence.row = self.free_rows.pop()
        sequence.block_ids = []
        sequence.num_computed = 0
        sequence.is_assigned = False

    def share_blocks(self, source: DrivenSequence, target: DrivenSequence, num_blocks: int) -> None:
        """Lets a request that has not run yet start from the first blocks of another."""
        target.block_ids = source.block_ids[:num_blocks]
        target.num_computed = num_blocks * self.block_size

    def descriptor(self, chunks: Sequence[tuple[DrivenSequence, int]]) -> BatchDescriptor:
        """Builds the step that computes the given number of tokens of each sequence."""
        builder = BatchBuilder()
        for index, (sequence, num_tokens) in enumerate(chunks):
            end = sequence.num_computed + num_tokens
            if not sequence.is_assigned:
                self._assign(builder, sequence)
            missing = -(-end // self.block_size) - len(sequence.block_ids)
            if missing > 0:
                new = [self.free_blocks.pop() for _ in range(missing)]
                builder.update_blocks(sequence.row, len(sequence.block_ids), new)
                sequence.block_ids += new
            builder.row_ids.append(sequence.row)
            builder.q_lens.append(num_tokens)
            builder.seq_lens.append(end)
            sequence.num_computed = end
            if end == sequence.num_tokens:
                self._sample(builder, sequence, index)
        self.step_id += 1
        return builder.build(
            step_id=self.step_id,
            is_prefill=any(num_tokens > 1 for _, num_tokens in chunks),
            graph_key=None,
            fallback_reason=FallbackReason.FALLBACK_REASON_UNSUPPORTED,
        )

    def launch(self, chunks: Sequence[tuple[DrivenSequence, int]]) -> Launched:
        """Executes a step without taking its result."""
        descriptor = self.descriptor(chunks)
        indices = read_int32(descriptor.sampling.sample_indices).tolist()
        return Launched(self.runner.execute(descriptor), [chunks[index][0] for index in indices])

    def collect(self, launched: Launched) -> StepResult:
        """Takes a step's result into the sequences."""
        result = launched.pending.message()
        tokens = read_int32(result.token_ids).tolist()
        for sequence, token_id in zip(launched.sampling, tokens, strict=True):
            sequence.token_ids.append(token_id)
        return result

    def step(self, chunks: Sequence[tuple[DrivenSequence, int]]) -> StepResult:
        """Executes a step and takes its result."""
        return self.collect(self.launch(chunks))

    def decode(self, sequences: Sequence[DrivenSequence], num_steps: int) -> None:
        """Computes the rest of each sequence, then decodes, `num_steps` steps in all."""
        for _ in range(num_steps):
            self.step([(each, each.num_tokens - each.num_computed) for each in sequences])

    def _assign(self, builder: BatchBuilder, sequence: DrivenSequence) -> None:
        builder.row_assignments.append(
            row_assignment(
                row=sequence.row,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt,
                sampling=sequence.sampling,
            )
        )
        sequence.is_assigned = True
        if sequence.block_ids:
            builder.update_blocks(sequence.row, 0, sequence.block_ids)

    def _sample(self, builder: BatchBuilder, sequence: DrivenSequence, index: int) -> None:
        builder.sample_indices.append(index)
        builder.all_greedy &= sequence.sampling.is_greedy
        builder.needs_logit_edits |= sequence.sampling.has_logit_edits
        builder.needs_logprobs |= sequence.sampling.logprobs is not None
        sequence.num_tokens += 1


def sampling(**changes: object) -> SamplingParams:
    """Returns greedy parameters with some of them changed."""
    return replace(GREEDY, **changes)
