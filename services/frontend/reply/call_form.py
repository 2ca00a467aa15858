"""The text around the arguments of tool calls, for grammars."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.frontend.engine_client.messages import ArgumentPairs, Tag, TaggedText


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a format writes calls."""

    before: str
    """Text before the arguments, with NAME for the tool's name."""
    after: str
    """Text after the arguments."""
    begin: str = ""
    """Text before the first call."""
    separator: str = ""
    """Text between two calls."""
    end: str = ""
    """Text after the last call."""
    trigger: str = ""
    """The text that calls begin with, which content never has; empty if there is none."""
    pairs: ArgumentPairs | None = None
    """How arguments are written, if not as a JSON object."""
    is_single: bool = False
    """Whether a reply has at most one call."""

    def tagged_text(
        self, schemas: Mapping[str, Mapping[str, Any]], *, is_required: bool, is_single: bool
    ) -> TaggedText:
        """Returns the grammar of replies.

        Args:
            schemas: the JSON Schema of each tool's arguments, by the tool's name.
            is_required: calls are all of the reply; otherwise content may come before or instead.
            is_single: there is at most one call.
        """
        tags = [
            Tag(
                begin=self.before.replace("NAME", name, 1),
                json_schema=json.dumps({"type": "object", **schema}, ensure_ascii=False),
                end=self.after,
                pairs=self.pairs,
            )
            for name, schema in schemas.items()
        ]
        return TaggedText(
            tags=tags,
            begin=self.begin,
            separator=self.separator,
            end=self.end,
            triggers=[] if is_required or not self.trigger else [self.trigger],
            stop_after_first=is_single or self.is_single,
        )
