"""The format of a served model's replies."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.engine_client.messages import Preamble
from services.frontend.reply.format_choice import FORMATS, format_of_template
from services.frontend.reply.reply_reader import ReplyReader, Tools
from services.frontend.text.template_source import TemplateSource
from services.frontend.text.tokenizer import Tokenizer

AUTO = "auto"
"""The name that leaves the choice to the chat template."""
WRITTEN_TOOLS = "hermes"
"""The format in which the frontend writes tools for templates that have none."""
_TAIL_TOKENS = 16
"""Last prompt tokens in which an opened reasoning shows."""


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """An operator's settings for replies."""

    format_name: str = AUTO
    max_reasoning_tokens: int | None = None
    """Limit of the reasoning for requests without one; None for no limit."""
    is_strict: bool = False
    """Whether a wish that the model cannot follow is refused, instead of left out."""


class ReasoningState(enum.Enum):
    """Whether a reply has reasoning."""

    POSSIBLE = enum.auto()
    """It may begin with reasoning."""
    OPEN = enum.auto()
    """It begins inside reasoning, which the prompt has opened."""
    CLOSED = enum.auto()
    """It has none."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Makes readers of replies."""

    name: str
    """Its name in FORMATS."""
    reader: type[ReplyReader]
    has_reasoning: bool
    """Whether replies may have reasoning."""
    token_bytes: Sequence[bytes]
    """The text of each token; special tokens are hidden, except those of the format."""
    shown_bytes: Sequence[bytes]
    """The same with all special tokens."""

    @classmethod
    def find(cls, source: TemplateSource, tokenizer: Tokenizer, *, name: str) -> "ReplyFormat":
        """Returns the format of a name, or that of a chat template if the name is AUTO."""
        text = source.text + (source.tool_text or "")
        if name == AUTO:
            name = format_of_template(text)
            # The frontend writes the tools, in this format.
            if not source.names_tools and FORMATS[name].think == FORMATS[WRITTEN_TOOLS].think:
                name = WRITTEN_TOOLS
        reader = FORMATS[name]
        return cls(
            name,
            reader,
            reader.always_reasons or reader.think[1] in text,
            tokenizer.token_bytes_with({*reader.special_tokens, *reader.think}),
            tokenizer.token_bytes(show_special_tokens=True),
        )

    @property
    def writes_tools(self) -> bool:
        """Whether replies can be read where the frontend writes the tools into the prompt."""
        return self.name == WRITTEN_TOOLS

    def reads(self, tools: Tools) -> bool:
        """Whether replies are read; otherwise a reply is its text."""
        return self.has_reasoning or bool(tools and self.reader.has_calls)

    def preamble(self, reasoning: ReasoningState, *, is_call: bool) -> Preamble | None:
        """Returns the reasoning before a grammar; None if there is none."""
        if reasoning is ReasoningState.CLOSED:
            return None
        begin, end = self.reader.preamble(is_call=is_call)
        return Preamble(begin="" if reasoning is ReasoningState.OPEN else begin, end=end)

    def reasoning_after(
        self, prompt_token_ids: Sequence[int], *, open_text: str = ""
    ) -> ReasoningState:
        """Returns the state of the reasoning at the end of a prompt, or of its `open_text`."""
        if not self.has_reasoning:
            return ReasoningState.CLOSED
        if open_text:
            begun, ended = (open_text.rfind(marker) for marker in self.reader.think)
            return ReasoningState.OPEN if begun > ended else ReasoningState.CLOSED
        tail = b"".join(self.shown_bytes[each] for each in prompt_token_ids[-_TAIL_TOKENS:])
        opening, closing = (marker.encode() for marker in self.reader.think)
        if tail.rstrip().endswith(opening):
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if tail.rstrip().endswith(closing) else ReasoningState.POSSIBLE
