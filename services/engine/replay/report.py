"""Describes the findings of a replay."""

from dataclasses import dataclass

from models import forward_context
from models.cudagraph_mode import GraphKind
from services.engine.batch import GraphKey
from services.engine.replay.compare import Deviation

MAX_LISTED = 8
"""Most listed tensors of one step; later ones mostly follow from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token or draft on which the recording and the two sides differ.

    name: position in its row's tokens. recorded, reference, tested: None if absent; recorded drafts
    are ignored where tokens were computed again. margin: difference of the tokens' logits on the
    reference side, relative to the largest logit of the row. Compared with the error of the logits
    it separates chance from fault.
    """

    name: str
    row: int
    recorded: int | None
    reference: int | None
    tested: int | None
    margin: float


@dataclass(slots=True, kw_only=True)
class StepFindings:
    """One step's comparison.

    shape: the batch, in words. deviations: of the compared tensors, in the order of a forward pass.
    tokens: the differing ones.
    """

    step_id: int
    shape: str
    graph_key: GraphKey | None
    deviations: list[Deviation]
    tokens: list[TokenDifference]

    @property
    def excessive(self) -> list[Deviation]:
        """Tensors with a deviation that rounding cannot explain."""
        return [each for each in self.deviations if each.is_excessive]

    @property
    def differs(self) -> bool:
        """Whether the results are not reproduced."""
        return bool(self.excessive or self.tokens)

    @property
    def is_exact(self) -> bool:
        """Whether all tensors are bit-equal."""
        return all(each.is_exact for each in self.deviations)


@dataclass(slots=True, kw_only=True)
class Totals:
    """A whole replay.

    num_given_up: steps that ran without their graph after it failed a test. worst_error: the
    largest that counts as rounding.
    """

    num_steps: int = 0
    num_by_graph: int = 0
    num_given_up: int = 0
    num_exact: int = 0
    num_different: int = 0
    num_in_tokens_alone: int = 0
    num_rebuilt_tokens: int = 0
    worst_error: float = 0.0
    first_difference: int | None = None

    @property
    def is_clean(self) -> bool:
        """Whether every step reproduced its results with its graph."""
        return not (self.num_different or self.num_given_up)

    def count(self, findings: StepFindings) -> None:
        """Counts one step."""
        self.num_steps += 1
        self.num_by_graph += findings.graph_key is not None
        if findings.differs:
            self.num_different += 1
            self.num_in_tokens_alone += not findings.excessive
            if self.first_difference is None:
                self.first_difference = findings.step_id
            return
        self.num_exact += findings.is_exact
        self.worst_error = max(self.worst_error, *(each.error for each in findings.deviations))


def describe_first(findings: StepFindings, names: tuple[str, str]) -> str:
    """Describes the first differing step and tensor.

    Args:
        findings: with the deviations of attention, if known.
        names: of the two sides.
    """
    lines = [
        f"step {findings.step_id} differs: {findings.shape}, {describe_graph(findings.graph_key)}"
    ]
    excessive = findings.excessive
    if excessive:
        lines.append(f"  first tensor: {_deviation(excessive[0])}")
        lines += [f"  then: {_deviation(each)}" for each in excessive[1:MAX_LISTED]]
        if len(excessive) > MAX_LISTED:
            lines.append(f"  and {len(excessive) - MAX_LISTED} more")
    else:
        inexact = [each for each in findings.deviations if not each.is_exact]
        lines.append("  all tensors agree, but for rounding" if inexact else "  no tensor differs")
        if inexact:
            lines.append(f"  first one that is not bit-equal: {_deviation(inexact[0])}")
            lines.append(f"  farthest off: {_deviation(max(inexact, key=lambda d: d.error))}")
    lines += [
        f"  {_token(token, names)}; their logits are {token.margin:.2g} apart"
        for token in findings.tokens
    ]
    return "\n".join(lines)


def describe_graph(key: GraphKey | forward_context.GraphKey | None) -> str:
    """Names the graph of a step."""
    if key is None:
        return "without a graph"
    return {
        GraphKind.DECODE: f"graph of {key.graph_bs} decodes",
        GraphKind.MIXED: f"graph of {key.num_tokens} tokens of at most {key.graph_bs} requests",
        GraphKind.PIECEWISE: f"graphs of pieces of {key.num_tokens} tokens",
        GraphKind.DRAFT: f"graph of the drafting behind {key.graph_bs} decodes",
        GraphKind.ENCODER: f"graph of the encoder of {key.num_tokens} patches",
    }[GraphKind(key.kind)]


def describe_totals(totals: Totals, tested: str) -> str:
    """Summarizes a replay in a few lines."""
    num_rounded = totals.num_steps - totals.num_exact - totals.num_different
    num_eager = totals.num_steps - totals.num_by_graph
    lines = [
        f"{totals.num_steps} steps against {tested}: {totals.num_by_graph} by graphs, "
        f"{num_eager} without",
        f"  {totals.num_exact} bit-equal, {num_rounded} equal but for rounding "
        f"(at most {totals.worst_error:.2g}), {totals.num_different} different",
    ]
    if totals.num_in_tokens_alone:
        lines[-1] += f", {totals.num_in_tokens_alone} of them in tokens alone"
    if totals.num_given_up:
        lines.append(f"  {totals.num_given_up} steps ran without their graph: it was given up")
    if totals.num_rebuilt_tokens:
        lines.append(
            f"  {totals.num_rebuilt_tokens} tokens from before the recording were computed again"
        )
    return "\n".join(lines)


def _token(token: TokenDifference, names: tuple[str, str]) -> str:
    recorded = [] if token.recorded is None else [f"recorded {token.recorded}"]
    sides = (f"{names[0]} {token.reference}", f"{names[1]} {token.tested}")
    return f"{token.name} of row {token.row}: {', '.join((*recorded, *sides))}"


def _deviation(deviation: Deviation) -> str:
    return f"{deviation.name}, off by {deviation.error:.2g} (tolerance {deviation.tolerance:.2g})"
