"""Answers of POST /v1/completions, whole or in chunks."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from services.frontend.engine_client.messages import Usage
from services.frontend.http.answers.choices import (
    Body,
    envelope,
    finish_reason,
    stop_reason,
    usage_body,
)
from services.frontend.http.answers.logprobs import PromptLogprobs
from services.frontend.http.completions.logprobs import CompletionLogprobs, text_offsets
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.served_model import ServedModel


class CompletionAnswer:
    """Answers POST /v1/completions."""

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        *,
        has_logprobs: bool,
        tells_prompt: bool,
        streams_usage: bool,
        num_samples: int,
        show_special_tokens: bool,
        stop_token_ids: Collection[int],
    ) -> None:
        """Starts a response; `streams_usage` adds a usage field to each chunk."""
        self._envelope = envelope(answer_id, "text_completion", model)
        self._has_logprobs = has_logprobs
        self._logprobs = defaultdict[int, CompletionLogprobs](
            lambda: CompletionLogprobs(model.tokenizer, show_special_tokens=show_special_tokens)
        )
        self._prompt_logprobs = PromptLogprobs(model.tokenizer) if tells_prompt else None
        self._tokenizer = model.tokenizer
        self._num_samples = num_samples
        self._stop_token_ids = stop_token_ids
        self._echoes: list[str] = []
        self._begun: set[int] = set()
        self._usage_field: Body = {"usage": None} if streams_usage else {}

    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the next prompt to each of its outputs."""
        first = len(self._echoes)
        self._echoes += [text] * self._num_samples
        if self._has_logprobs:
            offsets = text_offsets(self._tokenizer, token_ids, text)
            for index in range(first, len(self._echoes)):
                self._logprobs[index].echo(token_ids, offsets, len(text))

    def opening(self) -> list[Body]:
        """Returns nothing: the first chunk is the first output."""
        return []

    def chunk(self, output: Output) -> Body:
        """Returns new output as a chunk."""
        return {**self._envelope, "choices": [self._choice(output)], **self._usage_field}

    def usage_chunk(self, usage: Usage) -> Body:
        """Returns the chunk with the usage."""
        return {**self._envelope, "choices": [], "usage": usage_body(usage)}

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Body:
        """Returns all outputs, in the order of their indices, as one body."""
        choices = [self._choice(output) for output in outputs]
        if self._prompt_logprobs is not None:
            for index, choice in enumerate(choices):
                first = outputs[index - index % self._num_samples]
                choice["prompt_logprobs"] = self._prompt_logprobs.of(first)
        return {**self._envelope, "choices": choices, "usage": usage_body(usage)}

    def _choice(self, output: Output) -> Body:
        is_first = output.index not in self._begun
        self._begun.add(output.index)
        return {
            "index": output.index,
            "text": self._echoes[output.index] + output.text
            if is_first and self._echoes
            else output.text,
            "logprobs": self._logprobs[output.index].push(output) if self._has_logprobs else None,
            "finish_reason": finish_reason(output),
            **stop_reason(output, self._stop_token_ids),
        }
