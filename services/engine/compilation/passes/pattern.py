"""Patterns of operations, and the search for one that ends at a node."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from services.engine.compilation.passes.aliasing import is_written_between
from services.engine.compilation.passes.operations import operation_of, without_casts

_COMMUTATIVE = frozenset({"add", "mul"})
"""An in-place sum is not among them: it says which of its terms it changes."""


@dataclass(frozen=True, slots=True)
class Operand:
    """Any value. Where a name occurs twice, both values must be equal."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of exactly these arguments; the two of a sum or a product in either order.

    An argument is a pattern, a tuple of patterns, or a constant. A flag at the end that the call
    leaves out is not set.
    """

    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    """A pattern, perhaps followed by casts between float dtypes."""

    pattern: Any


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes that compute a pattern.

    values: of the pattern's operands, by name. nodes: the pattern's calls, the last one first.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an operand."""
        return self.values[name]


def find(*patterns: Call, at: Node) -> Match | None:
    """Returns the nodes that compute one of the patterns whose last call is the node `at`.

    None unless the node computes one, nothing else uses the results in between, and no operator
    overwrites what the calls read before the last one runs.
    """
    return next(find_all(*patterns, at=at), None)


def find_all(*patterns: Call, at: Node) -> Iterator[Match]:
    """Yields what `find` returns, for every order of the arguments of sums and products."""
    for pattern in patterns:
        for match in _matches(pattern, at, Match()):
            inner = match.nodes[1:]
            read = [value for each in inner for value in each.all_input_nodes]
            is_alone = all(_is_private(each, match.nodes) for each in inner)
            if is_alone and not (inner and is_written_between(read, min(inner), at)):
                yield match


def _is_private(node: Node, nodes: tuple[Node, ...]) -> bool:
    """Whether only the nodes use a node's value, perhaps cast."""
    return all(
        user in nodes or (without_casts(user) is not user and _is_private(user, nodes))
        for user in node.users
    )


def _matches(pattern: Any, value: Any, match: Match) -> Iterator[Match]:
    if isinstance(pattern, Operand):
        if pattern.name not in match.values:
            yield Match({**match.values, pattern.name: value}, match.nodes)
        elif match[pattern.name] is value:
            yield match
    elif isinstance(pattern, Cast):
        yield from _matches(pattern.pattern, without_casts(value), match)
    elif isinstance(pattern, Call):
        yield from _match_call(pattern, value, match)
    elif isinstance(pattern, tuple):
        if isinstance(value, (tuple, list)):
            yield from _match_each(pattern, value, match)
    elif not isinstance(value, Node) and value == pattern:
        yield match


def _match_call(pattern: Call, value: Any, match: Match) -> Iterator[Match]:
    operation = operation_of(value) if isinstance(value, Node) else None
    if operation is None or operation.name != pattern.name:
        return
    match = Match(match.values, (*match.nodes, value))
    yield from _match_each(pattern.args, operation.args, match)
    if pattern.name in _COMMUTATIVE:
        first, second, *rest = operation.args
        yield from _match_each(pattern.args, (second, first, *rest), match)


def _match_each(patterns: Sequence[Any], values: Sequence[Any], match: Match) -> Iterator[Match]:
    """Yields the ways in which each value matches the pattern in its position."""
    if not patterns and not any(value is not False for value in values):
        yield match
    elif patterns and values:
        for first in _matches(patterns[0], values[0], match):
            yield from _match_each(patterns[1:], values[1:], first)
