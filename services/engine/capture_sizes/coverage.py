"""Which steps the planned graphs have room for, of all that the scheduler's limits allow."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from services.engine.batch import GraphKey
from services.engine.capture_sizes.history import StepHistory
from services.engine.capture_sizes.planner import fit

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The graphs for one kind of step.

    sizes: of the graphs that these steps may run, ascending. limit: of a step's size.
    """

    sizes: Sequence[int]
    limit: int

    @property
    def largest(self) -> int:
        """The largest step with a graph; 0 if none has one."""
        return min(max(self.sizes, default=0), self.limit)

    @property
    def share(self) -> float:
        """Share of the possible sizes that have a graph."""
        return self.largest / self.limit

    @property
    def max_padding(self) -> int:
        """Most tokens that a graph computes for nobody: the largest gap between two sizes."""
        return max(
            (size - below - 1 for below, size in zip((0, *self.sizes), self.sizes, strict=False)),
            default=0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCoverage:
    """The graphs for steps of decodes only, and for all others."""

    decodes: Coverage
    others: Coverage

    @classmethod
    def of(
        cls, planned: Iterable[GraphKey], history: StepHistory, *, decode_q_len: int = 1
    ) -> "GraphCoverage":
        """Returns what the dispatcher will find once all planned graphs are captured.

        Args:
            planned: the graphs.
            history: tells the scheduler's limits.
            decode_q_len: query tokens of each request in a step of decodes.
        """
        planned = [key for key in planned if not key.is_draft]
        pieces = sorted({key.num_tokens for key in planned if not key.uniform})
        full = sorted(key.graph_bs for key in planned if key.uniform)
        # Decodes run as pieces where no whole graph is large enough.
        fitting = sorted({size // decode_q_len for size in pieces} - {0})
        beyond = [size for size in fitting if not full or size > full[-1]]
        max_decodes = min(history.max_num_seqs, history.max_num_batched_tokens // decode_q_len)
        return cls(
            decodes=_reachable([*full, *beyond], max_decodes),
            others=_reachable(pieces, history.max_num_batched_tokens),
        )

    def report(self, history: StepHistory) -> None:
        """Logs what is covered, and what that means for steps like those seen before."""
        decodes, others = self.decodes, self.others
        seen = [fit(history.decodes, decodes.sizes), fit(history.others, others.sizes)]
        num_steps = sum(each.num_steps for each in seen)
        figures: dict[str, float] = {"num_steps_seen": num_steps}
        if num_steps:
            computed = sum(each.num_computed for each in seen)
            padded = sum(each.num_padded for each in seen)
            figures["expected_hit_rate"] = round(sum(each.num_hits for each in seen) / num_steps, 4)
            figures["expected_padding"] = round(padded / computed, 4) if computed else 0.0
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
            **figures,
        )
        for kind, coverage in (("decodes", decodes), ("others", others)):
            # Where no graph is meant for a kind of step, running eagerly was the choice.
            if coverage.sizes and coverage.largest < coverage.limit:
                log.warning(
                    "graphs_do_not_cover_all_steps",
                    steps=kind,
                    largest=coverage.largest,
                    limit=coverage.limit,
                )


def _reachable(sizes: Sequence[int], limit: int) -> Coverage:
    """Leaves out the sizes that come after the first with room for any step."""
    return Coverage(sizes=sizes[: bisect_left(sizes, limit) + 1], limit=limit)
