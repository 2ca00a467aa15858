"""Sizes of steps as command lines name them, and the graphs that run them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.config.compilation import CompilationConfig


@dataclass(frozen=True, slots=True)
class Point:
    """A step: requests that decode, and tokens of one prompt."""

    num_decodes: int
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return self.num_decodes + self.num_prompt_tokens

    def __str__(self) -> str:
        """Returns the point as the command line takes it."""
        if not self.num_decodes:
            return f"p{self.num_prompt_tokens}"
        prompt = f"+{self.num_prompt_tokens}" if self.num_prompt_tokens else ""
        return f"{self.num_decodes}{prompt}"


def read_points(text: str) -> list[Point]:
    """Reads "1,8,p2048,64+512".

    Raises:
        argparse.ArgumentTypeError: a part is none of the three forms.
    """
    points = []
    for part in text.split(","):
        decodes, _, prompt = part.replace("p", "0+", 1).partition("+")
        try:
            point = Point(int(decodes), int(prompt or 0))
        except ValueError:
            point = Point(0, 0)
        if str(point) != part or point.num_tokens < 1:
            raise argparse.ArgumentTypeError(f"{part!r}; a point is N, pN or N+M")
        points.append(point)
    return points


def with_graphs_of(
    points: Sequence[Point], config: CompilationConfig, *, max_num_seqs: int, max_num_tokens: int
) -> CompilationConfig:
    """Returns a configuration that captures only the graphs of `config` that points run."""

    decodes = {each.num_decodes for each in points if not each.num_prompt_tokens}
    others = {each.num_tokens for each in points if each.num_prompt_tokens}
    return config.model_copy(
        update={
            "cudagraph_capture_sizes": _next_sizes(decodes, config.capture_sizes(max_num_seqs)),
            "cudagraph_piece_sizes": _next_sizes(others, config.piece_sizes(max_num_tokens)),
        }
    )


def _next_sizes(needed: set[int], planned: Sequence[int]) -> list[int]:
    """Returns the planned sizes that steps of the needed ones run by."""
    larger = ([size for size in planned if size >= need] for need in needed)
    return sorted({min(sizes) for sizes in larger if sizes})
