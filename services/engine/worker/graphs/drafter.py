"""Guesses the tokens that follow each request's newest one."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.deepseek_mtp import DeepseekMTP
from services.engine.spec_decode.verification import NO_DRAFT, count_accepted
from services.engine.worker.inputs.forward_pass import ForwardPass, PassShape
from services.engine.worker.inputs.input_buffers import InputBuffers, StepInputs
from services.engine.worker.inputs.step_arrays import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRows:
    """Where S rows stand once their drafts are verified.

    row_ids: [S] int32. num_accepted: [S] int64. newest: [S] int64, the position of each row's
        newest token. token_ids: [S] int32, that token. places: [S] int64, the query token before.
    """

    row_ids: Tensor
    num_accepted: Tensor
    newest: Tensor
    token_ids: Tensor
    places: Tensor

    @classmethod
    def of(
        cls, sampled: Tensor, drafts: Tensor, *, row_ids: Tensor, seq_lens: Tensor, ends: Tensor
    ) -> "VerifiedRows":
        """Compares what was sampled with the drafts.

        Args:
            sampled: [S, k + 1] int32, before each draft and behind the last one.
            drafts: [S, k] int32, padded with NO_DRAFT.
            row_ids: [S] int32.
            seq_lens: [S] int32, with the drafts.
            ends: [S] int32, the query token behind each row's last one.
        """
        num_accepted = count_accepted(sampled, drafts)
        behind_end = num_accepted - (drafts != NO_DRAFT).sum(dim=1)
        # A row without a sound token (NO_TOKEN) gets one that can be looked up.
        token_ids = sampled.gather(1, num_accepted[:, None]).squeeze(1).clamp(min=0)
        return cls(
            row_ids=row_ids,
            num_accepted=num_accepted,
            newest=seq_lens + behind_end,
            token_ids=token_ids,
            places=ends - 1 + behind_end,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What most likely follows S newest tokens.

    token_ids: [S, k] int32. hidden: k of [S, hidden], what each was chosen by.
    """

    token_ids: Tensor
    hidden: tuple[Tensor, ...]


class Drafter:
    """Runs the draft layers behind every step.

    Each of them first takes all query tokens of the step, so that its cache has an entry for every
    token the model's has. The last one then goes on alone, a token at a time, where more drafts are
    wanted than there are layers. A draft stands in its row as soon as it is made: the next layer
    finds its input there.
    """

    def __init__(
        self,
        layers: DeepseekMTP,
        forward: ForwardPass,
        buffers: InputBuffers,
        *,
        limits: StepLimits,
    ) -> None:
        self._layers = layers
        self._forward = forward
        self._buffers = buffers
        self._limits = limits

    def draft(
        self, inputs: StepInputs, shape: PassShape, hidden: Tensor, rows: VerifiedRows
    ) -> Drafted:
        """Writes the newest token of S rows, guesses the k that follow and writes them too.

        Args:
            inputs: the step's T query tokens.
            shape: of a pass over all of them.
            hidden: [T, hidden], what the model made of them.
            rows: those that sampled. The dummy row may be among them.
        """
        num_drafts = self._limits.num_speculative_tokens
        num_whole = min(self._layers.num_layers, num_drafts)
        self._write(rows, rows.newest, rows.token_ids)
        made, states = [], []
        with self._forward.context(inputs, shape):
            for depth in range(num_whole):
                tokens = self._following(inputs, 1 + depth)
                hidden = self._layers(tokens, inputs.positions, hidden, depth)
                if len(rows.row_ids):
                    states.append(hidden.index_select(0, rows.places))
                    made.append(self._choose(states[-1], depth, rows))
        if not made:
            return Drafted(token_ids=rows.row_ids.new_empty((0, num_drafts)), hidden=())
        single = self._single_shape(shape)
        for depth in range(num_whole, num_drafts):
            ahead = rows.newest + depth - num_whole
            step = _single_tokens(
                made[-1], rows.row_ids, ahead.clamp(max=self._limits.max_model_len - 1)
            )
            with self._forward.context(step, single):
                states.append(self._layers(step.input_ids, step.positions, states[-1], depth))
            made.append(self._choose(states[-1], depth, rows))
        return Drafted(token_ids=torch.stack(made, dim=1), hidden=tuple(states))

    def _following(self, inputs: StepInputs, distance: int) -> Tensor:
        """Returns the token that stands `distance` behind each query token, [T] int32.

        Behind a row's last token that is any token; its guess is nobody's.
        """
        tokens = self._buffers.tokens
        positions = (inputs.positions + distance).clamp(max=tokens.shape[1] - 1)
        return tokens[inputs.row_ids.index_select(0, inputs.token_request), positions]

    def _choose(self, last: Tensor, depth: int, rows: VerifiedRows) -> Tensor:
        """Returns the most likely token of each row, [S] int32, and writes it behind the others."""
        token_ids = self._layers.compute_logits(last, depth).argmax(dim=-1).int()
        self._write(rows, rows.newest + 1 + depth, token_ids)
        return token_ids

    def _write(self, rows: VerifiedRows, positions: Tensor, token_ids: Tensor) -> None:
        """Writes a token into each row; what has no place there goes to the last column.

        So do the tokens of the dummy row, whose content graphs are tested with.
        """
        buffers = self._buffers
        last_column = buffers.tokens.shape[1] - 1
        is_dummy = rows.row_ids == buffers.dummy_row
        at = positions.clamp(max=last_column).masked_fill(is_dummy, last_column)
        buffers.append_tokens(rows.row_ids, at, token_ids)

    def _single_shape(self, shape: PassShape) -> PassShape:
        """Returns the shape of a pass of one token behind the newest of each row."""
        limits = self._limits
        longest = shape.max_seqlen_k + limits.num_speculative_tokens
        return replace(
            shape,
            is_prefill=False,
            max_seqlen_q=1,
            max_seqlen_k=min(longest, limits.max_model_len),
        )


def _single_tokens(token_ids: Tensor, row_ids: Tensor, positions: Tensor) -> StepInputs:
    """Returns a step of one token for each of S rows; all are [S], positions int64."""
    starts = torch.arange(len(row_ids) + 1, dtype=torch.int32, device=row_ids.device)
    return StepInputs(
        query_start_loc=starts,
        seq_lens=positions.int() + 1,
        row_ids=row_ids,
        sample_indices=starts[:0],
        append_positions=starts[:0],
        input_ids=token_ids,
        positions=positions,
        token_request=starts[:-1].long(),
    )
