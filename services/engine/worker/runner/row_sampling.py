"""Sampling parameters of all rows, on the host and on the device.

The host's copy decides what work a step needs without asking the device; the device's copy is for
the sampling itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.ops.sampling.penalize_tokens import Penalties
from services.engine.batch import RowAssignment, RowSampling, read_float32, read_int32
from services.engine.request import MAX_EOS_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from services.engine.sampling.logit_edits import LogitEdits
from services.engine.sampling.sampler import TokenChoice
from services.engine.worker.inputs.checks import Int32Array
from services.engine.worker.inputs.transfer import to_device

MAX_END_TOKEN_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
"""Most end tokens of a row: its stop tokens and the model's end-of-sequence ids together."""


class _Real(IntEnum):
    """Columns of the float32 table."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    FREQUENCY = 4
    PRESENCE = 5


class _Whole(IntEnum):
    """Columns of the int64 table."""

    SEED = 0
    TOP_K = 1
    NUM_PROMPT_TOKENS = 2
    MIN_TOKENS = 3
    HAS_PENALTIES = 4
    NUM_BIASES = 5
    NUM_END_TOKENS = 6
    NUM_LOGPROBS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The S rows of a step that sample, [S] int32 on the device and on the host.

    seq_lens: tokens of each, which is the position that the sampled token takes. Where the host
        does not know them yet, host_seq_lens are the most and host_least_lens the fewest.
    """

    row_ids: Tensor
    seq_lens: Tensor
    host_row_ids: Int32Array
    host_seq_lens: Int32Array
    host_least_lens: Int32Array


class RowSamplingTable:
    """Sampling parameters by row."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._reals = _Mirror((num_rows, len(_Real)), np.float32, device)
        self._wholes = _Mirror((num_rows, len(_Whole)), np.int64, device)
        self._bias_ids = _Mirror((num_rows, MAX_LOGIT_BIAS), np.int32, device)
        self._bias_values = _Mirror((num_rows, MAX_LOGIT_BIAS), np.float32, device)
        self._end_ids = _Mirror((num_rows, MAX_END_TOKEN_IDS), np.int32, device)
        self._edited = _LastUpload(device)

    def assign(self, assignments: Sequence[RowAssignment]) -> None:
        """Gives rows to new requests.

        Raises:
            ValueError: a row's biases or end tokens do not fit or are outside the vocabulary.
        """
        if not assignments:
            return
        for assignment in assignments:
            self._write(assignment.row, assignment.num_prompt_tokens, assignment.sampling)
        rows = np.array([assignment.row for assignment in assignments], np.int64)
        self._reals.publish(rows)
        self._wholes.publish(rows)
        if any(assignment.sampling.bias_token_ids for assignment in assignments):
            self._bias_ids.publish(rows)
            self._bias_values.publish(rows)
        if any(assignment.sampling.end_token_ids for assignment in assignments):
            self._end_ids.publish(rows)

    def choice(self, sampled: SampledRows) -> TokenChoice:
        """Returns how the rows choose their tokens."""
        reals = self._reals.columns(sampled.row_ids)
        wholes = self._wholes.columns(sampled.row_ids)
        return TokenChoice(
            temperature=reals[_Real.TEMPERATURE],
            top_k=wholes[_Whole.TOP_K],
            top_p=reals[_Real.TOP_P],
            min_p=reals[_Real.MIN_P],
            seeds=wholes[_Whole.SEED],
            positions=sampled.seq_lens,
        )

    def edits(self, sampled: SampledRows, tokens: Tensor) -> LogitEdits | None:
        """Returns the edits of the rows' logits, from the token table; None when there are none."""
        wholes = self._wholes.host[sampled.host_row_ids]
        num_output = sampled.host_least_lens - wholes[:, _Whole.NUM_PROMPT_TOKENS]
        is_short = num_output < wholes[:, _Whole.MIN_TOKENS]
        has_edits = wholes[:, _Whole.HAS_PENALTIES] | wholes[:, _Whole.NUM_BIASES] | is_short
        edited = np.flatnonzero(has_edits)
        if not len(edited):
            return None
        indices = self._edited.on_device(edited)
        row_ids, seq_lens = sampled.row_ids, sampled.seq_lens
        if len(edited) < len(row_ids):
            row_ids = row_ids.index_select(0, indices)
            seq_lens = seq_lens.index_select(0, indices)
        biases = []
        if num_biases := int(wholes[:, _Whole.NUM_BIASES].max()):
            biases.append(self._logit_bias(row_ids, num_biases))
        if is_short.any():
            num_end_tokens = int(wholes[:, _Whole.NUM_END_TOKENS].max())
            biases.append(self._min_tokens_bias(row_ids, seq_lens, num_end_tokens))
        penalties = None
        if wholes[:, _Whole.HAS_PENALTIES].any():
            longest = int(sampled.host_seq_lens[edited].max())
            penalties = self._penalties(row_ids, seq_lens, tokens[:, :longest])
        return LogitEdits(indices=indices, penalties=penalties, biases=tuple(biases))

    def num_prompt_tokens(self, host_row_ids: Int32Array) -> Int32Array:
        """Returns how many tokens of each row are its prompt."""
        counts: Int32Array = self._wholes.host[host_row_ids, _Whole.NUM_PROMPT_TOKENS].astype("<i4")
        return counts

    def num_logprobs(self, sampled: SampledRows) -> int:
        """Returns the largest number of most likely tokens that a row asks for."""
        return max(0, int(self._wholes.host[sampled.host_row_ids, _Whole.NUM_LOGPROBS].max()))

    def _write(self, row: int, num_prompt_tokens: int, sampling: RowSampling) -> None:
        penalties = (
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        bias_ids = read_int32(sampling.bias_token_ids)
        end_ids = read_int32(sampling.end_token_ids)
        self._require_vocabulary(bias_ids)
        self._require_vocabulary(end_ids)
        self._reals.host[row] = (sampling.temperature, sampling.top_p, sampling.min_p, *penalties)
        self._wholes.host[row] = (
            sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed,
            sampling.top_k,
            num_prompt_tokens,
            sampling.min_tokens,
            penalties != (1, 0, 0),
            len(bias_ids),
            len(end_ids),
            sampling.num_logprobs,
        )
        _write_front(self._bias_ids.host[row], bias_ids)
        _write_front(self._bias_values.host[row], read_float32(sampling.bias_values))
        _write_front(self._end_ids.host[row], end_ids)

    def _require_vocabulary(self, token_ids: Int32Array) -> None:
        """Raises ValueError if a token id is outside the vocabulary."""
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._vocab_size:
            raise ValueError(
                f"sampling names token {token_ids.max()}; the vocabulary has {self._vocab_size}"
            )

    def _logit_bias(self, row_ids: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        num_biases = self._wholes.device[:, _Whole.NUM_BIASES].index_select(0, row_ids)
        values = self._bias_values.device[:, :num_columns].index_select(0, row_ids)
        token_ids = self._bias_ids.device[:, :num_columns].index_select(0, row_ids)
        return token_ids, values.masked_fill(~_is_front(num_biases, num_columns), 0.0)

    def _min_tokens_bias(
        self, row_ids: Tensor, seq_lens: Tensor, num_columns: int
    ) -> tuple[Tensor, Tensor]:
        """Returns -inf for the end tokens of rows that are too short to end."""
        wholes = self._wholes.columns(row_ids)
        num_output = seq_lens - wholes[_Whole.NUM_PROMPT_TOKENS]
        is_short = num_output < wholes[_Whole.MIN_TOKENS]
        is_end = _is_front(wholes[_Whole.NUM_END_TOKENS], num_columns)
        token_ids = self._end_ids.device[:, :num_columns].index_select(0, row_ids)
        values = torch.zeros(token_ids.shape, device=self._device)
        return token_ids, values.masked_fill(is_end & is_short[:, None], -torch.inf)

    def _penalties(self, row_ids: Tensor, seq_lens: Tensor, tokens: Tensor) -> Penalties:
        reals = self._reals.columns(row_ids)
        return Penalties(
            tokens=tokens,
            row_ids=row_ids,
            seq_lens=seq_lens,
            num_prompt_tokens=self._wholes.columns(row_ids)[_Whole.NUM_PROMPT_TOKENS],
            repetition=reals[_Real.REPETITION],
            frequency=reals[_Real.FREQUENCY],
            presence=reals[_Real.PRESENCE],
        )


class _Mirror:
    """A table that the host writes and the device reads; on a CPU the two are one."""

    def __init__(self, shape: tuple[int, int], dtype: npt.DTypeLike, device: torch.device) -> None:
        self.host: npt.NDArray[Any] = np.zeros(shape, dtype)
        self.device = torch.from_numpy(self.host).to(device)

    def publish(self, rows: npt.NDArray[np.int64]) -> None:
        """Copies the host's rows to the device."""
        device = self.device.device
        if device.type != "cpu":
            values = to_device(self.host[rows], device)
            self.device.index_copy_(0, to_device(rows, device), values)

    def columns(self, row_ids: Tensor) -> tuple[Tensor, ...]:
        """Returns each column at some rows, every one contiguous."""
        return self.device.t().index_select(1, row_ids).unbind(0)


class _LastUpload:
    """The last array copied to the device, which most steps use again."""

    def __init__(self, device: torch.device) -> None:
        self._host: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._copy = to_device(self._host, device)

    def on_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        """Returns the array on the device, without a copy if it equals the last one."""
        if not np.array_equal(array, self._host):
            self._host, self._copy = array, to_device(array, self._copy.device)
        return self._copy


def _write_front(row: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
    """Writes values to the front of a row, whose rest is never used."""
    if len(values) > len(row):
        raise ValueError(f"sampling lists {len(values)} tokens; the limit is {len(row)}")
    row[: len(values)] = values


def _is_front(counts: Tensor, num_columns: int) -> Tensor:
    """Returns [E, num_columns], true in the first counts[i] columns of row i."""
    return torch.arange(num_columns, device=counts.device) < counts[:, None]
