"""Verifies a step's drafts and makes the next ones."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from models.forward_context import GraphKey, SpecDecodeMetadata, get_forward_context
from services.engine.limits import StepLimits
from services.engine.spec_decode.verification import NO_DRAFT, Drafted, count_accepted
from services.engine.worker.inputs.forward_pass import ForwardPass
from services.engine.worker.inputs.input_buffers import InputBuffers, Inputs


class DraftModel(Protocol):
    """Guesses tokens after a step; `models.deepseek_mtp.DeepseekMTP` says how it is called."""

    num_layers: int
    keeps_position: bool
    """Whether it makes all guesses of a step from the last known token, whose position it gets."""
    run_steps: list[Callable[..., Tensor]]

    def fill(self, token_ids: Tensor, positions: Tensor) -> None:
        """Writes the cache entries of T tokens before it guesses, if guessing does not."""

    def __call__(self, token_ids: Tensor, positions: Tensor, hidden: Tensor, depth: int) -> Tensor:
        """Computes one guess for each of T tokens, [T, hidden]."""

    def compute_logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Maps [S, hidden] to the logits of the tokens guessed, [S, vocab]."""

    def most_likely(self, hidden: Tensor, depth: int) -> Tensor:
        """Returns the most likely of the tokens guessed, [S] int64, NO_TOKEN without one."""


class Drafter:
    """Verifies the drafts of every step and runs the draft layers after it, if there are any.

    A small model takes all query tokens of the step, then guesses one token at a time from the
    newest on. Draft layers need no such pass: each layer first takes all query tokens of the step,
    so that its cache covers the same tokens as the model's. If more drafts are wanted than there
    are layers, the last layer continues alone, one token at a time. Each draft is written into its
    row, where the next layer reads it.
    """

    def __init__(
        self,
        layers: DraftModel | None,
        forward: ForwardPass,
        buffers: InputBuffers,
        *,
        limits: StepLimits,
    ) -> None:
        self._layers = layers
        self._forward = forward
        self._buffers = buffers
        self._max_model_len = limits.max_model_len
        self._num_drafts = limits.num_speculative_tokens
        self._num_made = limits.num_worker_drafts

    def draft(
        self,
        inputs: Inputs,
        hidden: Tensor,
        *,
        sampled: Tensor,
        drafts: Tensor,
        num_next: int,
        key: GraphKey | None = None,
        num_single: int | None = None,
    ) -> Drafted:
        """Writes the newest token of S rows and the n tokens most likely to follow it.

        Without draft layers no token is guessed. Draft layers cover the step's tokens even where
        none is wanted, so that later drafts find their entries.

        Args:
            inputs: the step's T query tokens; its rows may include the dummy row. input_ids and
                positions may be longer, n, where data-parallel ranks compute equally many rows.
            hidden: [n, hidden], the model's hidden states.
            sampled: [S, k + 1] int32, sampled before each draft and after the last.
            drafts: [S, k] int32, padded with NO_DRAFT.
            num_next: n, at most k.
            key: the graph to record, if any.
            num_single: rows of a pass of one token of each request, at least S; by default S.
        """
        metadata = SpecDecodeMetadata(
            draft_token_ids=drafts,
            num_spec_steps=self._num_drafts,
            num_draft_tokens=(drafts != NO_DRAFT).sum(dim=1),
            num_next_drafts=num_next,
        )
        row_ids, seq_lens, ends = inputs.row_ids, inputs.seq_lens, inputs.query_start_loc[1:]
        if len(sampled) < len(row_ids):
            row_ids, seq_lens, ends = (
                each.index_select(0, inputs.sample_indices) for each in (row_ids, seq_lens, ends)
            )
        layers = self._layers
        num_whole = 0 if layers is None else min(layers.num_layers, self._num_drafts)
        made, states = [], []
        with self._forward.context(inputs, key, metadata):
            num_accepted, past_end = _verify(sampled)
            newest, last_known = seq_lens + past_end, ends - 1 + past_end
            # A row with NO_TOKEN gets a token that can be looked up.
            token_ids = sampled.gather(1, num_accepted[:, None]).squeeze(1).clamp(min=0)
            self._write(row_ids, newest, token_ids)
            if layers is not None:
                layers.fill(inputs.input_ids, inputs.positions)
            for depth in range(num_whole):
                assert layers is not None, "it counted some"
                tokens = self._following(inputs, 1 + depth)
                hidden = layers(tokens, inputs.positions, hidden, depth)
                if len(row_ids) and depth < num_next:
                    states.append(hidden.index_select(0, last_known))
                    made.append(self._choose(layers, states[-1], depth, row_ids, newest))
        num_single = len(row_ids) if num_single is None else num_single
        for depth in range(num_whole, num_next if num_single else 0):
            if layers is None:
                break
            if not len(row_ids):
                self._join_others(layers, inputs, hidden[:1], depth, num_single)
                continue
            last = made[-1] if made else token_ids
            offset = -1 if layers.keeps_position else depth - num_whole
            step = self._single_tokens(inputs, last, row_ids, newest + offset)
            hidden = states[-1] if states else hidden.index_select(0, last_known)
            with self._forward.context(step, key, metadata, has_single_tokens=True):
                states.append(_run_padded(layers, step, hidden, depth, num_single))
            made.append(self._choose(layers, states[-1], depth, row_ids, newest))
        return Drafted(
            sampled=sampled.view(-1),
            num_accepted=num_accepted.int(),
            token_ids=_columns_of(made, drafts[:, : self._num_made]),
            hidden=tuple(states),
        )

    def _following(self, inputs: Inputs, distance: int) -> Tensor:
        """Returns the token `distance` positions after each query token, [n] int32.

        Past a row's last token it is arbitrary; no row uses the guess after it.
        """
        tokens, num_tokens = self._buffers.tokens, len(inputs.token_request)
        positions = (inputs.positions[:num_tokens] + distance).clamp(max=tokens.shape[1] - 1)
        following = tokens[inputs.row_ids.index_select(0, inputs.token_request), positions]
        return padded(following, len(inputs.positions))

    def _join_others(
        self, layers: DraftModel, inputs: Inputs, hidden: Tensor, depth: int, num_rows: int
    ) -> None:
        """Runs a pass of single tokens over a dummy: other data-parallel ranks need this one."""
        row_ids = inputs.row_ids.new_full((1,), self._buffers.dummy_row)
        step = self._single_tokens(inputs, row_ids * 0, row_ids, inputs.positions[:1] * 0)
        with self._forward.context(step, has_single_tokens=True):
            _run_padded(layers, step, hidden, depth, num_rows)

    def _choose(
        self, layers: DraftModel, last: Tensor, depth: int, row_ids: Tensor, newest: Tensor
    ) -> Tensor:
        """Writes the most likely token into each row and returns it, [S] int32."""
        token_ids = layers.most_likely(last, depth).int()
        self._write(row_ids, newest + 1 + depth, token_ids)
        return token_ids

    def _write(self, row_ids: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Writes a token into each row; tokens past the row's end go to the last column.

        Tokens of the dummy row also go there: graphs are tested with its content.
        """
        buffers = self._buffers
        last_column = buffers.tokens.shape[1] - 1
        is_dummy = row_ids == buffers.dummy_row
        at = positions.clamp(max=last_column).masked_fill(is_dummy, last_column)
        buffers.append_tokens(row_ids, at, token_ids)

    def _single_tokens(
        self, inputs: Inputs, token_ids: Tensor, row_ids: Tensor, positions: Tensor
    ) -> Inputs:
        """Returns inputs of one token per row; all are [S], positions int64."""
        positions = positions.clamp(max=self._max_model_len - 1)
        starts = torch.arange(len(row_ids) + 1, dtype=torch.int32, device=row_ids.device)
        return Inputs(
            query_start_loc=starts,
            seq_lens=positions.int() + 1,
            row_ids=row_ids,
            sample_indices=starts[:0],
            append_positions=starts[:0],
            num_drafts=starts[:0],
            input_ids=token_ids,
            positions=positions,
            token_request=starts[:-1].long(),
            max_seqlen_q=1,
            max_seqlen_k=min(inputs.max_seqlen_k + self._num_drafts, self._max_model_len),
            is_prefill=False,
        )


def padded(x: Tensor, num_rows: int) -> Tensor:
    """Returns x [T, ...] with zeros after it, if it has fewer rows."""
    missing = num_rows - x.shape[0]
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing > 0 else x


def _run_padded(
    layers: DraftModel, step: Inputs, hidden: Tensor, depth: int, num_rows: int
) -> Tensor:
    """Computes one guess for each of S tokens, [S, hidden], as `num_rows` rows."""
    token_ids, positions = padded(step.input_ids, num_rows), padded(step.positions, num_rows)
    states = layers(token_ids, positions, padded(hidden, num_rows), depth)
    return states[: len(step.token_request)]


def _columns_of(made: list[Tensor], like: Tensor) -> Tensor:
    """Returns drafts [S] as columns, filled up with NO_DRAFT to a shape."""
    missing = torch.full_like(like[:, len(made) :], NO_DRAFT)
    return torch.cat((*(each[:, None] for each in made), missing), dim=1)


def _verify(sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Compares the samples of S rows, [S, k + 1], with the drafts of the forward context.

    Returns:
        The number of accepted drafts of each row, and the distance from its last token to its
        newest: 0 if all are accepted, else negative. Both [S] int64.
    """
    metadata = get_forward_context().spec_decode_metadata
    assert metadata is not None, "draft passes have drafts"
    num_accepted = count_accepted(sampled, metadata.draft_token_ids)
    return num_accepted, num_accepted - metadata.num_draft_tokens
