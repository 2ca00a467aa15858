"""A draft model that knows what will come and errs now and then, as if at random."""

from itertools import pairwise

import torch


class GuessedDrafts:
    """Guesses the tokens of known sequences, wrongly after a share of their tokens.

    It is a small model without caches: see models.draft_model.SmallModel.
    """

    def __init__(self, model, sequences, *, max_model_len, seed=0, wrong_every=3):
        """Takes the model, which decides what graphs hold, and sequences as it continues them."""
        self.modules = model.modules
        self._vocab_size = vocab_size = model.config.vocab_size
        following_tokens = torch.zeros(max_model_len + 1, vocab_size, dtype=torch.int64)
        for sequence in sequences:
            for position, (token, following) in enumerate(pairwise(sequence)):
                following_tokens[position, token] = following
        self._next = following_tokens.to(next(model.parameters()).device)
        self._seed = seed
        self._wrong_every = wrong_every
        self.lm_head = self

    def cache_specs(self):
        return []

    def __call__(self, token_ids, positions):
        """Maps T tokens at their positions to what follows them, [T, 1]."""
        tokens = token_ids.long()
        drawn = positions * 7919 + tokens * 104729 + self._seed * 31
        is_wrong = drawn % 1013 % self._wrong_every == 0
        following = (self._next[positions, tokens] + is_wrong) % self._vocab_size
        return following[:, None].float()

    def local_logits(self, hidden):
        return hidden

    def most_likely(self, hidden):
        return hidden[:, 0].long()
