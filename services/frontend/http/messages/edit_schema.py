"""Edits of a conversation in a Messages body: parts are cleared before the model sees it."""

from typing import Annotated, Literal

from pydantic import Field

from services.frontend.http.fields.body import Body
from services.frontend.http.fields.generation import Count

_MAX_EDITS = 8


class ThinkingTurns(Body):
    """A number of the model's last turns with thinking."""

    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class AllTurns(Body):
    """All of the model's turns."""

    type: Literal["all"]


class ClearThinking(Body):
    """Clears the thinking of earlier turns."""

    type: Literal["clear_thinking_20251015"]
    keep: (
        Literal["all"] | Annotated[ThinkingTurns | AllTurns, Field(discriminator="type")] | None
    ) = None
    """Absent: one turn."""

    @property
    def num_kept(self) -> int | None:
        """The number of last turns that keep their thinking; None for all."""
        if self.keep is None:
            return 1
        return self.keep.value if isinstance(self.keep, ThinkingTurns) else None


class InputTokens(Body):
    """A number of the prompt's tokens."""

    type: Literal["input_tokens"]
    value: Count


class ToolUses(Body):
    """A number of tool calls."""

    type: Literal["tool_uses"]
    value: Count


class ClearToolUses(Body):
    """Clears the results of earlier tool calls."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[InputTokens | ToolUses, Field(discriminator="type")] = InputTokens(
        type="input_tokens", value=100_000
    )
    """From where on anything is cleared."""
    keep: ToolUses = ToolUses(type="tool_uses", value=3)
    """The last calls, which keep their results."""
    clear_at_least: InputTokens | None = None
    """Nothing is cleared if it would be less."""
    exclude_tools: list[str] | None = None
    """Tools whose results are kept."""
    clear_tool_inputs: bool | list[str] | None = None
    """Whether inputs are cleared, too, or the tools whose inputs are."""

    @property
    def least_tokens(self) -> int:
        """The number of tokens that must be cleared for anything to be."""
        return 0 if self.clear_at_least is None else self.clear_at_least.value

    def clears_input_of(self, name: str) -> bool:
        """Whether the inputs of a tool's cleared calls are cleared, too."""
        wanted = self.clear_tool_inputs
        return name in wanted if isinstance(wanted, list) else bool(wanted)


Edit = Annotated[ClearThinking | ClearToolUses, Field(discriminator="type")]


class ContextManagement(Body):
    """The edits, in the order in which they are applied."""

    edits: Annotated[list[Edit], Field(max_length=_MAX_EDITS, fail_fast=True)] | None = None
