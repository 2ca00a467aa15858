"""The share of possible steps that the planned graphs cover."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import structlog

from services.engine.batch import GraphKey, GraphKind
from services.engine.capture_sizes.history import StepHistory
from services.engine.capture_sizes.planner import Fit
from services.engine.limits import StepLimits

log = structlog.get_logger()

_PIECES = (GraphKind.GRAPH_KIND_MIXED, GraphKind.GRAPH_KIND_PIECEWISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Sizes of the graphs for one kind of step, ascending, and the limit of a step's size.

    allows_padding: a graph serves smaller steps too.
    """

    sizes: Sequence[int]
    limit: int
    allows_padding: bool = True

    @classmethod
    def of(cls, sizes: Sequence[int], limit: int, *, allows_padding: bool) -> "Coverage":
        """Leaves out the sizes after the first one with room for any step."""
        return cls(
            sizes=sizes[: bisect_left(sizes, limit) + 1],
            limit=limit,
            allows_padding=allows_padding,
        )

    @property
    def largest(self) -> int:
        """The largest step with a graph; 0 if none has one."""
        return min(max(self.sizes, default=0), self.limit)

    @property
    def share(self) -> float:
        """Share of possible sizes with a graph."""
        return (self.largest if self.allows_padding else len(self.sizes)) / self.limit

    @property
    def max_padding(self) -> int:
        """Most padding tokens of a step: the largest gap between two sizes."""
        if not self.allows_padding:
            return 0
        gaps = (size - below - 1 for below, size in zip((0, *self.sizes), self.sizes, strict=False))
        return max(gaps, default=0)

    def fit(self, counts: Mapping[int, int]) -> Fit:
        """Counts the hits and the padding of steps, which are counted by size."""
        if not self.allows_padding:
            # Other sizes have no graph, as if they were larger than all.
            beyond = max(self.sizes, default=0) + 1
            moved = Counter[int]()
            for size, count in counts.items():
                moved[size if size in self.sizes else beyond] += count
            counts = moved
        return Fit.of(counts, self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCoverage:
    """The graphs for steps of only decodes, and for all other steps."""

    decodes: Coverage
    others: Coverage

    @classmethod
    def of(
        cls, planned: Collection[GraphKey], limits: StepLimits, *, allows_padding: bool = True
    ) -> "GraphCoverage":
        """Returns the coverage once all planned graphs are captured."""
        full = sorted({key.graph_bs for key in planned if key.kind == GraphKind.GRAPH_KIND_DECODE})
        pieces = sorted({key.num_tokens for key in planned if key.kind in _PIECES})
        # Decodes above the largest decode graph run as pieces.
        fitting = sorted({size // limits.decode_q_len for size in pieces} - {0})
        beyond = [size for size in fitting if not full or size > full[-1]]
        return cls(
            decodes=Coverage.of(
                [*full, *beyond], limits.max_decodes, allows_padding=allows_padding
            ),
            others=Coverage.of(
                pieces, limits.max_num_batched_tokens, allows_padding=allows_padding
            ),
        )

    def report(self, history: StepHistory) -> None:
        """Logs the coverage, and the expected hit rate and padding from observed steps."""
        decodes, others = self.decodes, self.others
        seen = [decodes.fit(history.decodes), others.fit(history.others)]
        expected: dict[str, float] = {}
        if num_steps := history.num_steps:
            num_hits = sum(each.num_hits for each in seen)
            num_computed = sum(each.num_computed for each in seen)
            num_padded = sum(each.num_padded for each in seen)
            expected["expected_hit_rate"] = round(num_hits / num_steps, 4)
            expected["expected_padding"] = round(num_padded / max(1, num_computed), 4)
        log.info(
            "graph_coverage_reported",
            decodes_up_to=decodes.largest,
            max_decodes=decodes.limit,
            decode_share=round(decodes.share, 4),
            decode_max_padding=decodes.max_padding,
            others_up_to=others.largest,
            max_num_batched_tokens=others.limit,
            other_share=round(others.share, 4),
            other_max_padding=others.max_padding,
            num_steps_seen=num_steps,
            **expected,
        )
        for kind, coverage in (("decodes", decodes), ("others", others)):
            # A kind of step without any graph runs eagerly by choice.
            if coverage.sizes and coverage.largest < coverage.limit:
                log.warning(
                    "graphs_do_not_cover_all_steps",
                    steps=kind,
                    largest=coverage.largest,
                    limit=coverage.limit,
                )
