"""The grammar that a request's output follows."""

import enum
from dataclasses import dataclass


class GrammarKind(enum.Enum):
    """The form of a request's grammar."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"
    TAGGED = "tagged"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A request's grammar; see protos/common/v1/sampling.proto."""

    kind: GrammarKind | None
    """None: any text may follow the preamble."""
    texts: tuple[str, ...] = ()
    """The schema, expression or grammar; all texts of a choice; empty for a JSON object.

    For a tagged text, its fields as JSON; see `tagged_grammar`.
    """
    preamble: tuple[str, str] | None = None
    """Begin and end of free text before the form."""
    max_preamble_tokens: int | None = None
    """Tokens of the preamble after which its end is forced; None for no limit."""
    begun: str = ""
    """The beginning of the form, with which the prompt ends."""
