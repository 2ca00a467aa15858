"""How large steps were: what capture sizes are planned from."""

from collections import Counter
from dataclasses import dataclass, field

from models.cudagraph_mode import CUDAGraphMode
from protos.engine.v1.batch_pb2 import Context


@dataclass(slots=True)
class StepHistogram:
    """Counts of steps by size. Sizes are bounded by the scheduler's limits, so this is too.

    decodes: steps in which every request had one query token, by number of requests.
    others: all other steps, by number of query tokens.
    """

    decodes: Counter[int] = field(default_factory=Counter)
    others: Counter[int] = field(default_factory=Counter)

    @property
    def num_steps(self) -> int:
        """Steps counted."""
        return self.decodes.total() + self.others.total()

    def count(self, context: Context) -> None:
        """Counts one step that ran."""
        kind = self.decodes if context.num_tokens == context.batch_size else self.others
        kind[context.num_tokens] += 1

    def by_graph_kind(self, mode: CUDAGraphMode) -> tuple[Counter[int], Counter[int]]:
        """Returns the sizes of the steps that whole graphs are for, and those that pieces are for.

        Args:
            mode: what runs as captured graphs.
        """
        nothing = Counter[int]()
        full = self.decodes if mode.decode_mode() is CUDAGraphMode.FULL else nothing
        pieces = self.others if mode.mixed_mode() else nothing
        if mode.decode_mode() is CUDAGraphMode.PIECEWISE:
            pieces = pieces + self.decodes
        return full, pieces

    def halved(self) -> "StepHistogram":
        """Returns half of every count, rounded down: a size seen once is forgotten."""
        return StepHistogram(_halved(self.decodes), _halved(self.others))

    def __add__(self, other: "StepHistogram") -> "StepHistogram":
        return StepHistogram(self.decodes + other.decodes, self.others + other.others)

    def __sub__(self, other: "StepHistogram") -> "StepHistogram":
        return StepHistogram(self.decodes - other.decodes, self.others - other.others)


def _halved(counts: Counter[int]) -> Counter[int]:
    return Counter({size: count // 2 for size, count in counts.items() if count > 1})
