"""Token embedding and output head, with the vocabulary split over the ranks of a group."""

import torch
from torch import nn
from torch.nn import functional

from models.layers.weight import check_shape, empty_parameter
from models.ops.linear.linear import linear
from models.parallel.group import ParallelGroup


class VocabParallelEmbedding(nn.Module):
    """Token vectors; each rank holds an equal run of token ids.

    The vocabulary is padded with zero rows to a multiple of the number of ranks.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, group: ParallelGroup) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self._num_local = -(-vocab_size // group.size)
        self._first = group.rank * self._num_local
        self.weight = empty_parameter(self._num_local, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids to [T, hidden]."""
        if self.group.size == 1:
            return functional.embedding(token_ids, self.weight)
        local_ids = token_ids - self._first
        is_foreign = (local_ids < 0) | (local_ids >= self._num_local)
        vectors = functional.embedding(local_ids.masked_fill(is_foreign, 0), self.weight)
        return self.group.all_reduce(vectors.masked_fill(is_foreign.unsqueeze(-1), 0))

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: int) -> None:
        """Copies this rank's run of rows; rows past the vocabulary become zero."""
        check_shape(loaded, (self.vocab_size, param.shape[1]))
        rows = loaded[self._first : self._first + self._num_local]
        param[: len(rows)].copy_(rows)
        param[len(rows) :].zero_()


class ParallelLMHead(VocabParallelEmbedding):
    """Logits from hidden states; its weight has the embedding's layout and may be shared.

    scale: factor of the logits.
    soft_cap: c > 0 makes each scaled logit x c * tanh(x / c).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: ParallelGroup,
        scale: float = 1.0,
        soft_cap: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, hidden_size, group=group)
        self._scale = scale
        self._soft_cap = soft_cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [S, hidden] to [S, vocab] on every rank."""
        logits = self.group.all_gather(self._scaled(linear(hidden, self.weight, None)))
        return logits[:, : self.vocab_size]

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._soft_cap:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return logits
