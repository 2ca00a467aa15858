"""Samples a step's tokens from its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.layers.decoder import CausalLM
from services.engine.batch import RowAssignment, SamplingMetadata
from services.engine.limits import StepLimits
from services.engine.sampling.grammar_masks import apply_grammars
from services.engine.sampling.logit_edits import edit_logits
from services.engine.sampling.logprobs import Logprobs, compute_logprobs
from services.engine.sampling.sampler import greedy, sample
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.inputs.input_buffers import Header, InputBuffers
from services.engine.worker.inputs.sampled_positions import SampledPositions
from services.engine.worker.runner.outputs import ForwardOutput, Sampled
from services.engine.worker.runner.prompt_logprobs import SLICE_ROWS, prompt_logprobs
from services.engine.worker.runner.row_sampling import RowSamplingTable, SampledRows


class NoSampling:
    """The sampling of a pipeline stage before the last: none."""

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Does nothing with the sampling parameters of new requests."""

    def sample(self, batch: Batch, output: ForwardOutput) -> Sampled:
        """Returns no tokens."""
        del batch
        return Sampled(token_ids=output.header.row_ids.new_empty(0))


class StepSampler:
    """The sampling parameters of all rows, and the sampling of a step."""

    def __init__(
        self,
        buffers: InputBuffers,
        model: CausalLM,
        *,
        limits: StepLimits,
        device: torch.device,
    ) -> None:
        self._buffers = buffers
        self._model = model
        self._head = model.lm_head
        self._limits = limits
        self._columns = torch.arange(limits.decode_q_len, dtype=torch.int32, device=device)
        self._table = RowSamplingTable(
            num_rows=limits.max_num_seqs, vocab_size=limits.vocab_size, device=device
        )

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Takes the sampling parameters of new requests."""
        self._table.assign(assignments)

    def sample(self, batch: Batch, output: ForwardOutput) -> Sampled:
        """Samples for the requests that are due; every rank comes to the same tokens.

        The most likely tokens are found without the other ranks' logits; anything else gathers
        them. Without drafts, also writes the tokens into their rows; otherwise verification does.
        """
        sampling, logits, logprobs = batch.sampling, output.logits, None
        if logits is None:
            token_ids = output.header.row_ids.new_empty(0)
        elif output.token_ids is not None and not _needs_choice(sampling):
            token_ids = output.token_ids
        elif not _needs_choice(sampling):
            token_ids = self._most_likely(batch, output.header, logits)
        else:
            rows = self._rows(batch, output.header)
            logits = self._head.gathered(logits)
            chosen = self._choose(sampling, rows, logits)
            token_ids = chosen.int()
            if batch.drafts is None or sampling.needs_logprobs:
                # The next step looks up a token of every row, even after NO_TOKEN.
                chosen = chosen.clamp(min=0)
            if batch.drafts is None:
                self._buffers.append_tokens(rows.row_ids, rows.seq_lens, chosen.int())
            if sampling.needs_logprobs:
                logprobs = compute_logprobs(logits, chosen, self._table.num_logprobs(rows))
        return Sampled(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(batch, output.hidden),
        )

    def _most_likely(self, batch: Batch, header: Header, logits: Tensor) -> Tensor:
        """Returns the most likely tokens, [n] int32; without drafts writes them into their rows."""
        if batch.drafts is not None:
            return self._head.most_likely(logits).int()
        rows = self._rows(batch, header)
        return self._head.append_most_likely(
            logits, self._buffers.tokens, rows.row_ids, rows.seq_lens
        )

    def _rows(self, batch: Batch, header: Header) -> SampledRows:
        """Returns the rows that sample and the position of each token, in the logits' order."""
        drafts = batch.drafts
        if drafts is not None:
            at = SampledPositions.of(header, self._columns)
            return SampledRows(
                # Kernels read arrays; reshape alone would leave one request's rows a single number.
                row_ids=at.row_ids.contiguous().view(-1),
                seq_lens=at.positions.view(-1),
                host_row_ids=drafts.row_ids.ravel(),
                host_seq_lens=drafts.positions.ravel(),
                host_least_lens=drafts.least_positions.ravel(),
            )
        if len(batch.sample_indices) == len(batch.seq_lens):
            return SampledRows(
                row_ids=header.row_ids,
                seq_lens=header.seq_lens,
                host_row_ids=batch.row_ids,
                host_seq_lens=batch.seq_lens,
                host_least_lens=batch.seq_lens,
            )
        host_seq_lens = batch.seq_lens[batch.sample_indices]
        return SampledRows(
            row_ids=header.row_ids.index_select(0, header.sample_indices),
            seq_lens=header.seq_lens.index_select(0, header.sample_indices),
            host_row_ids=batch.row_ids[batch.sample_indices],
            host_seq_lens=host_seq_lens,
            host_least_lens=host_seq_lens,
        )

    def _choose(self, sampling: SamplingMetadata, rows: SampledRows, logits: Tensor) -> Tensor:
        """Returns one token per row of logits [n, V], which stay if log-probabilities follow."""
        may_overwrite = not sampling.needs_logprobs
        if sampling.needs_logit_edits:
            edits = self._table.edits(rows, self._buffers.tokens)
            if edits is not None:
                logits = edit_logits(logits, edits, in_place=may_overwrite)
                may_overwrite = True
        if sampling.grammar_rows:
            logits = apply_grammars(
                logits, sampling, self._limits.vocab_size, in_place=may_overwrite
            )
        if sampling.all_greedy:
            return greedy(logits)
        return sample(logits, self._table.choice(rows))

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> Logprobs | None:
        if not batch.sampling.prompt_logprob_requests:
            return None
        adapters = self._buffers.adapters
        return prompt_logprobs(
            batch,
            self._table.num_prompt_tokens(batch.row_ids),
            hidden=hidden,
            tokens=self._buffers.tokens,
            compute_logits=self._model.compute_logits,
            adapter_slots=None if adapters is None else adapters.of_step(),
            slice_rows=min(SLICE_ROWS, self._limits.max_num_seqs),  # whose memory was measured
        )


def _needs_choice(sampling: SamplingMetadata) -> bool:
    """Whether a step needs more than each row's most likely token."""
    return (
        not sampling.all_greedy
        or sampling.needs_logit_edits
        or sampling.needs_logprobs
        or bool(sampling.grammar_rows)
    )
