"""Guesses the tokens that follow each request's newest one."""

import torch
from torch import Tensor

from models.deepseek_mtp import DeepseekMTP
from services.engine.worker.forward_pass import ForwardPass, PassShape
from services.engine.worker.input_buffers import InputBuffers, StepHeader, StepInputs
from services.engine.worker.step_arrays import StepArrays, StepLimits


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
        self,
        arrays: StepArrays,
        header: StepHeader,
        hidden: Tensor,
        *,
        row_ids: Tensor,
        newest: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Returns the k tokens that most likely follow each of S newest tokens, [S, k] int32.

        Args:
            arrays: the step's T query tokens.
            header: the same on the device.
            hidden: [T, hidden], what the model made of them.
            row_ids: [S] int32, the rows that sampled.
            newest: [S] int32, the position of each row's newest token, which is in its row.
            places: [S] int64, the query token before it.
        """
        num_drafts = self._limits.num_speculative_tokens
        num_whole = min(self._layers.num_layers, num_drafts)
        inputs = self._buffers.gather(header, arrays.num_tokens)
        longest = int((arrays.query_start_loc[1:] - arrays.query_start_loc[:-1]).max())
        shape = PassShape(
            is_prefill=longest > self._limits.decode_q_len,
            max_seqlen_q=longest,
            max_seqlen_k=int(arrays.seq_lens.max()),
            is_draft=True,
        )
        drafts = []
        with self._forward.context(inputs, shape):
            for depth in range(num_whole):
                tokens = self._following(inputs, 1 + depth)
                hidden = self._layers(tokens, inputs.positions, hidden, depth)
                if len(row_ids):
                    last = hidden.index_select(0, places)
                    drafts.append(self._choose(last, depth, row_ids, newest))
        if not drafts:
            return row_ids.new_empty((0, num_drafts))
        for depth in range(num_whole, num_drafts):
            positions = (newest + depth - num_whole).clamp(max=self._limits.max_model_len - 1)
            step = _single_tokens(drafts[-1], row_ids, positions)
            with self._forward.context(step, self._single_shape(arrays)):
                last = self._layers(step.input_ids, step.positions, last, depth)
            drafts.append(self._choose(last, depth, row_ids, newest))
        return torch.stack(drafts, dim=1)

    def _following(self, inputs: StepInputs, distance: int) -> Tensor:
        """Returns the token that stands `distance` behind each query token, [T] int32.

        Behind a row's last token that is any token; its guess is nobody's.
        """
        tokens = self._buffers.tokens
        positions = (inputs.positions + distance).clamp(max=tokens.shape[1] - 1)
        return tokens[inputs.row_ids.index_select(0, inputs.token_request), positions]

    def _choose(self, last: Tensor, depth: int, row_ids: Tensor, newest: Tensor) -> Tensor:
        """Returns the most likely token of each row, [S] int32, and writes it behind the others."""
        token_ids = self._layers.compute_logits(last, depth).argmax(dim=-1).int()
        at = (newest + 1 + depth).clamp(max=self._buffers.tokens.shape[1] - 1)
        self._buffers.append_tokens(row_ids, at, token_ids)
        return token_ids

    def _single_shape(self, arrays: StepArrays) -> PassShape:
        """Returns the shape of a pass of one token behind the newest of each row."""
        limits = self._limits
        longest = int(arrays.seq_lens.max()) + limits.num_speculative_tokens
        return PassShape(
            is_prefill=False,
            max_seqlen_q=1,
            max_seqlen_k=min(longest, limits.max_model_len),
            is_draft=True,
        )


def _single_tokens(token_ids: Tensor, row_ids: Tensor, positions: Tensor) -> StepInputs:
    """Returns a step of one token for each of S rows; all are [S] int32."""
    starts = torch.arange(len(row_ids) + 1, dtype=torch.int32, device=row_ids.device)
    return StepInputs(
        query_start_loc=starts,
        seq_lens=positions + 1,
        row_ids=row_ids,
        sample_indices=starts[:0],
        append_positions=starts[:0],
        input_ids=token_ids,
        positions=positions.long(),
        token_request=starts[:-1].long(),
    )
