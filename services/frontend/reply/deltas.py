"""The pieces that a reply consists of."""

from dataclasses import dataclass


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
