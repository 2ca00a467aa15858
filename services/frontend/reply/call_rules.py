"""The calls that a reply may or must have."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallRules:
    """A caller's rules for the tool calls of a reply."""

    is_required: bool = False
    """Whether the reply must be calls."""
    name: str = ""
    """The tool to be called; empty allows all."""
    is_single: bool = False
    """Whether the reply has at most one call."""
    strict: frozenset[str] = frozenset()
    """The tools whose arguments always follow their schema."""

    @property
    def need_grammar(self) -> bool:
        """Whether a model alone may break them."""
        return self.is_required or self.is_single or bool(self.strict)
