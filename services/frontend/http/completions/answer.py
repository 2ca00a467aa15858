"""Answers of POST /v1/completions, whole or in chunks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from services.frontend.engine_client.messages import Usage as EngineUsage
from services.frontend.http.answers.choices import (
    ChoicesAnswer,
    Envelope,
    StopReason,
    UsageField,
    finish_reason,
    usage_body,
)
from services.frontend.http.answers.logprobs import PromptField
from services.frontend.http.bodies.call import Call
from services.frontend.http.completions.logprobs import CompletionLogprobs, text_offsets
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.served_model import ServedModel


class CompletionChoice(StopReason, PromptField):
    """One output of a completion, or new output in a chunk."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Envelope, UsageField):
    """The answer of POST /v1/completions, and the data of its events."""

    id: str
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionAnswer(ChoicesAnswer):
    """Answers POST /v1/completions."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        super().__init__(call, model)
        shows_special = call.options.show_special_tokens
        self._logprobs = defaultdict[int, CompletionLogprobs](
            lambda: CompletionLogprobs(model.tokenizer, show_special_tokens=shows_special)
        )
        self._tokenizer = model.tokenizer
        self._echoes: list[str] = []
        self._begun: set[int] = set()

    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the next prompt to each of its outputs."""
        first = len(self._echoes)
        self._echoes += [text] * self._num_samples
        if self._has_logprobs:
            offsets = text_offsets(self._tokenizer, token_ids, text)
            for index in range(first, len(self._echoes)):
                self._logprobs[index].echo(token_ids, offsets, len(text))

    def chunk(self, output: Output) -> Completion:
        """Returns new output as a chunk."""
        return self._body([self._choice(output, {})], self._usage_field)

    def usage_chunk(self, usage: EngineUsage) -> Completion:
        """Returns the chunk with the usage."""
        return self._body([], {"usage": usage_body(usage)})

    def whole(self, outputs: Sequence[Output], usage: EngineUsage) -> Completion:
        """Returns all outputs, in the order of their indices, as one body."""
        firsts = [outputs[i - i % self._num_samples] for i in range(len(outputs))]
        choices = [
            self._choice(output, self._prompt_logprobs.field(first))
            for output, first in zip(outputs, firsts, strict=True)
        ]
        return self._body(choices, {"usage": usage_body(usage)})

    def _body(self, choices: list[CompletionChoice], usage: UsageField) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            **self._envelope,
            "choices": choices,
            **usage,
        }

    def _choice(self, output: Output, prompt: PromptField) -> CompletionChoice:
        is_first = output.index not in self._begun
        self._begun.add(output.index)
        return {
            "index": output.index,
            "text": self._echoes[output.index] + output.text
            if is_first and self._echoes
            else output.text,
            "logprobs": self._logprobs[output.index].push(output) if self._has_logprobs else None,
            "finish_reason": finish_reason(output),
            **self._stop_reason(output),
            **prompt,
        }
