"""Replies in the form of the Messages API: content blocks, whole or as events."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.frontend.engine_client.messages import STOP, Usage
from services.frontend.http.answers.weights import weights_of
from services.frontend.http.messages.answer_schema import (
    AppliedEdit,
    BlockMore,
    EditsField,
    MessageEnding,
    MessageEvent,
    MessageUsage,
    ReplyBlock,
    ReplyMessage,
    StopReason,
)
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.tools import arguments_text
from services.frontend.reply.deltas import CallPiece


@dataclass(slots=True)
class Block:
    """One content block of a reply."""

    index: int
    kind: str
    call: CallPiece | None = None
    texts: list[str] = field(default_factory=list)

    def opening(self) -> ReplyBlock:
        """Returns the block without its text."""
        match self.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
        assert self.call is not None, "a block of another kind is a call"
        return {"type": "tool_use", "id": self.call.call_id, "name": self.call.name, "input": {}}

    def whole(self) -> ReplyBlock:
        """Returns the block with all its text."""
        block, text = self.opening(), "".join(self.texts)
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = text
            case "tool_use":
                block["input"] = _input_of(text)
        return block

    def delta(self, text: str) -> BlockMore:
        """Returns more text as the part of an event."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
        return {"type": "input_json_delta", "partial_json": text}


class MessageAnswer:
    """One reply, from its outputs to its body or its events."""

    def __init__(
        self,
        answer_id: str,
        model: str,
        *,
        num_prompt_tokens: int,
        shows_thinking: bool = True,
        applied_edits: Sequence[AppliedEdit] | None = None,
    ) -> None:
        """Starts a reply without content.

        Args:
            answer_id: its id.
            model: the model's name.
            num_prompt_tokens: the number of the prompt's tokens.
            shows_thinking: whether blocks of thinking have their text.
            applied_edits: what was cleared from the conversation; None if that was not asked for.
        """
        self._id = answer_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._shows_thinking = shows_thinking
        self._edits: EditsField = {}
        if applied_edits is not None:
            self._edits = {"context_management": {"applied_edits": list(applied_edits)}}
        self._block: Block | None = None
        self._num_blocks = 0
        self._has_calls = False

    def opening(self) -> list[MessageEvent]:
        """Returns the events before any output; what was cached is known at the end."""
        usage = usage_body(Usage(prompt_tokens=self._num_prompt_tokens))
        message = self._message([], _ending(None, None), usage, {})
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events(self, output: Output) -> Iterator[MessageEvent]:
        """Yields the events of new output, except those at the end of the reply."""
        for block, text in self._pieces(output):
            if block is not self._block:
                yield from self._block_end()
                self._block = block
                opening = block.opening()
                yield {
                    "type": "content_block_start",
                    "index": block.index,
                    "content_block": opening,
                }
            if text:
                yield {
                    "type": "content_block_delta",
                    "index": block.index,
                    "delta": block.delta(text),
                }

    def closing(self, last: Output, usage: Usage) -> Iterator[MessageEvent]:
        """Yields the events after the last output."""
        yield from self._block_end()
        delta = _ending(self._stop_reason(last), last.stop_string)
        yield {"type": "message_delta", "delta": delta, "usage": usage_body(usage), **self._edits}
        yield {"type": "message_stop"}

    def whole(self, outputs: Sequence[Output], usage: Usage) -> ReplyMessage:
        """Returns a reply as one body."""
        blocks: list[Block] = []
        for output in outputs:
            for block, text in self._pieces(output):
                if block is not self._block:
                    self._block = block
                    blocks.append(block)
                block.texts.append(text)
        last = outputs[-1]
        ending = _ending(self._stop_reason(last), last.stop_string)
        content = [block.whole() for block in blocks]
        return self._message(content, ending, usage_body(usage), self._edits)

    def _message(
        self,
        content: list[ReplyBlock],
        ending: MessageEnding,
        usage: MessageUsage,
        edits: EditsField,
    ) -> ReplyMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **ending,
            "usage": usage,
            **edits,
        }

    def _pieces(self, output: Output) -> Iterator[tuple[Block, str]]:
        """Yields new text with its block, which becomes the current one."""
        new_calls = [call for call in output.calls if call.call_id]
        # Input of a call that has begun precedes all other output.
        for call in output.calls:
            if not call.call_id:
                assert self._block is not None, "its first piece has opened a block"
                yield self._block, call.arguments
        for kind, text in (("thinking", output.reasoning), ("text", output.text)):
            if text:
                is_shown = kind != "thinking" or self._shows_thinking
                yield self._block_of(kind), text if is_shown else ""
        for call in new_calls:
            self._has_calls = True
            yield self._new_block("tool_use", call), call.arguments

    def _block_of(self, kind: str) -> Block:
        """Returns the current block if it is of the kind, else a new one."""
        block = self._block
        return block if block is not None and block.kind == kind else self._new_block(kind)

    def _new_block(self, kind: str, call: CallPiece | None = None) -> Block:
        self._num_blocks += 1
        return Block(self._num_blocks - 1, kind, call)

    def _block_end(self) -> list[MessageEvent]:
        return (
            []
            if self._block is None
            else [{"type": "content_block_stop", "index": self._block.index}]
        )

    def _stop_reason(self, last: Output) -> StopReason:
        if last.finish_reason != STOP:
            return "max_tokens"
        if last.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._has_calls else "end_turn"


def usage_body(usage: Usage) -> MessageUsage:
    """Returns the usage in tokens; input tokens are the uncached ones."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        **weights_of(usage),
    }


def _ending(reason: StopReason | None, stop_string: str | None) -> MessageEnding:
    return {"stop_reason": reason, "stop_sequence": stop_string}


def _input_of(text: str) -> dict[str, Any]:
    """Returns a call's input; a model without a grammar, or cut off, may write other text."""
    read: dict[str, Any] = json.loads(arguments_text(text))
    return read
