"""Packed masks of tokens, for kernels and for constraints that need no grammar."""

from collections.abc import Callable, Iterable

import numpy as np
import torch


def pack_bits(is_allowed: torch.Tensor) -> torch.Tensor:
    """Returns [G, V] booleans as [G, ceil(V / 32)] int32, token t in bit t % 32 of word t // 32."""
    num_rows, size = is_allowed.shape
    padded = np.zeros((num_rows, 32 * -(-size // 32)), np.uint8)
    padded[:, :size] = is_allowed.cpu().numpy()
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())


def mask_of(allowed: Iterable[int], vocab_size: int) -> bytes:
    """Returns the packed mask that allows these tokens."""
    is_allowed = torch.zeros(1, vocab_size, dtype=torch.bool)
    is_allowed[0, list(allowed)] = True
    return pack_bits(is_allowed).numpy().tobytes()


class ManualConstraint:
    """A constraint whose masks come when the test says so; `rule` returns them."""

    num_free_tokens = 0

    def __init__(
        self, rule: Callable[[list[int]], Iterable[int]], *, vocab_size: int, is_instant: bool
    ) -> None:
        self._rule = rule
        self._vocab_size = vocab_size
        self._is_instant = is_instant
        self.token_ids: list[int] = []
        self.mask: bytes | None = None
        self.on_mask = self.on_end = lambda *_: None
        self.work_out()

    def listen(self, on_mask, on_end) -> None:
        self.on_mask, self.on_end = on_mask, on_end

    def advance(self, token_id: int) -> None:
        assert self.mask is not None, "two tokens were chosen from one mask"
        assert token_id in set(self._rule(self.token_ids)), "a token that was not allowed"
        self.token_ids.append(token_id)
        self.mask = None
        if self._is_instant:
            self.work_out()

    def work_out(self) -> None:
        """Makes the next mask known."""
        self.mask = mask_of(self._rule(self.token_ids), self._vocab_size)
        self.on_mask()

    def close(self) -> None:
        """Forgets the request."""
        self.on_mask = self.on_end = lambda *_: None
