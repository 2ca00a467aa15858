"""The pieces of a reply."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    """0 for the reply's first call."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: text of a JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of one tool call; its first piece has its id and name."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """More of a reply."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    """At most one piece of each call."""


def piece_of(deltas: Sequence[Delta]) -> ReplyPiece:
    """Gathers the deltas of one step."""
    match deltas:
        case []:
            return ReplyPiece()
        case [Content(text)]:
            return ReplyPiece(text)
        case [CallArguments(index, text)]:
            return ReplyPiece(calls=(CallPiece(index, arguments=text),))
    calls = [
        CallPiece(delta.index, delta.call_id, delta.name)
        if isinstance(delta, CallStart)
        else CallPiece(delta.index, arguments=delta.text)
        for delta in deltas
        if isinstance(delta, CallStart | CallArguments)
    ]
    return ReplyPiece(
        "".join(delta.text for delta in deltas if isinstance(delta, Content)),
        "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        joined_calls(calls),
    )


def joined_calls(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Joins the pieces of each call, in the order of the calls."""
    of_call: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        of_call.setdefault(piece.index, []).append(piece)
    return [
        replace(of_one[0], arguments="".join(piece.arguments for piece in of_one))
        for of_one in of_call.values()
    ]


def merged(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbours of one kind."""
    if len(deltas) < 2:
        return deltas
    joined: list[Delta] = []
    for _, group in groupby(deltas, key=_kind_of):
        first, *others = group
        if isinstance(first, CallStart):
            joined += [first, *others]
        else:
            texts = [each.text for each in others if not isinstance(each, CallStart)]
            joined.append(replace(first, text="".join([first.text, *texts])))
    return joined


def _kind_of(delta: Delta) -> tuple[type[Delta], int | None]:
    return type(delta), delta.index if isinstance(delta, CallStart | CallArguments) else None
