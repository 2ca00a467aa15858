"""Token embedding and output head, with the vocabulary split over the ranks of a group."""

import torch
from torch import nn
from torch.nn import functional

from models.batch_invariance import row_wise
from models.layers.weight import check_shape, empty_parameter
from models.ops.elementwise.local_embedding import local_embedding
from models.ops.products.add_adapters import add_embedding_adapters, add_slots
from models.ops.products.linear import linear
from models.ops.ranks.all_gather import all_gather
from models.ops.ranks.all_reduce import all_reduce
from models.ops.sampling.sample_tokens import where_sound
from models.ops.sampling.step_tokens import choose_greedily
from models.parallel.group import ParallelGroup


class VocabParallelEmbedding(nn.Module):
    """Token vectors; each rank holds an equal run of token ids.

    The vocabulary is padded with zero rows to a multiple of the number of ranks.
    """

    adapter_a: torch.Tensor | None
    adapter_b: torch.Tensor | None
    adapter_identity: torch.Tensor | None

    def __init__(self, vocab_size: int, hidden_size: int, *, group: ParallelGroup) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self._num_local = -(-vocab_size // group.size)
        self._first = group.rank * self._num_local
        if self._first >= vocab_size:
            raise ValueError(f"{vocab_size} tokens are too few for {group.size} ranks")
        self.weight = empty_parameter(self._num_local, hidden_size)
        # Room for low-rank adapters, if any; see models.layers.adapter_room.
        self.register_buffer("adapter_a", None, persistent=False)
        self.register_buffer("adapter_b", None, persistent=False)
        self.register_buffer("adapter_identity", None, persistent=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps [T] int32 or int64 token ids to [T, hidden]."""
        if self.group.size == 1:
            return self._adapted(functional.embedding(token_ids, self.weight), token_ids)
        vectors = local_embedding(token_ids, self.weight, self._first)
        return all_reduce(self._adapted(vectors, token_ids), self.group.name)

    def _adapted(self, vectors: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns this rank's vectors with those of each token's adapter."""
        a, b, identity = self.adapter_a, self.adapter_b, self.adapter_identity
        if a is None or b is None or identity is None:
            return vectors
        return add_embedding_adapters(vectors, token_ids, a, b, identity, self._first)

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

    def forward(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Maps [S, hidden] to the logits of this rank's tokens, [S, vocab / ranks rounded up].

        slots: [at least S] int32, the slot of each row's adapter, as in the forward context; None
            adds none.
        """
        logits = linear(hidden, self.weight, None)
        if slots is not None and self.adapter_a is not None and self.adapter_b is not None:
            parts = (self._num_local,)
            logits = add_slots(logits, hidden, self.adapter_a, self.adapter_b, parts, slots)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._soft_cap:
            logits = row_wise(self._capped, logits)
        return logits

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        return self._soft_cap * torch.tanh(logits / self._soft_cap)

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """Maps every rank's logits to those of the vocabulary, [S, vocab], on every rank."""
        if self.group.size == 1:
            return logits
        return all_gather(logits, self.group.name, self.group.size)[:, : self.vocab_size]

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the most likely token of each row, [S] int64, from every rank's logits.

        The lowest id wins a tie; a row whose largest logit is NaN or infinite gets NO_TOKEN. Each
        rank sends its best token and its logit, so the logits themselves stay where they are.
        """
        if self.group.size == 1:
            return where_sound(*logits.max(dim=-1))
        # The padding of the vocabulary has logits too, of 0.
        largest, at = logits[:, : self.vocab_size - self._first].max(dim=-1)
        best = torch.stack((largest.float().view(torch.int32), (at + self._first).int()), dim=-1)
        every = all_gather(best, self.group.name, self.group.size).view(len(best), -1, 2)
        values = every[..., 0].contiguous().view(torch.float32)
        largest = values.amax(dim=-1)
        is_best = values == largest.unsqueeze(-1)
        beyond = torch.iinfo(torch.int32).max
        token_ids = every[..., 1].masked_fill(~is_best, beyond).amin(dim=-1)
        return where_sound(largest, token_ids.long())

    def append_most_likely(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        row_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Returns `most_likely` as int32, and writes it to a table as `choose_greedily` does."""
        if self.group.size == 1:
            return choose_greedily(logits, tokens, row_ids, positions)
        token_ids = self.most_likely(logits).int()
        tokens.index_put_((row_ids, positions), token_ids.clamp(min=0))
        return token_ids
