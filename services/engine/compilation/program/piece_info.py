"""Facts about a piece for the code that wraps it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceInfo:
    """A piece's position among the pieces of its model, in the order they run."""

    name: str
    index: int
    num_pieces: int

    @property
    def is_first(self) -> bool:
        """Whether it takes the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes the model's output."""
        return self.index == self.num_pieces - 1


PieceWrapper = Callable[[Callable[..., Any], PieceInfo], Callable[..., Any]]
"""Wraps a piece's call, for example with the capture and replay of a graph."""
