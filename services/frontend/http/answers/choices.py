"""Response bodies of completions and chat completions, whole or in chunks."""

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from services.frontend.engine_client.messages import STOP, Usage
from services.frontend.http.answers.echo import text_offsets
from services.frontend.http.answers.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
)
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.served_model import ServedModel

Body = dict[str, Any]


class Answer(Protocol):
    """Builds the response bodies of one request."""

    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the text of the next prompt, which has these tokens, to each of its outputs."""

    def opening(self) -> list[Body]:
        """Returns the chunks before any output."""

    def chunk(self, output: Output) -> Body:
        """Returns new output as a chunk."""

    def usage_chunk(self, usage: Usage) -> Body:
        """Returns the chunk with the usage, after the last output."""

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Body:
        """Returns all outputs, in the order of their indices, as one body."""


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
        self._envelope = _envelope(answer_id, "text_completion", model)
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
            "finish_reason": _finish_reason(output),
            **_stop_reason(output, self._stop_token_ids),
        }


class ChatAnswer:
    """Answers POST /v1/chat/completions."""

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
        del show_special_tokens  # tokens have no offsets into the text
        self._envelope = _envelope(answer_id, "chat.completion", model)
        self._chunk_envelope = {**self._envelope, "object": "chat.completion.chunk"}
        self._logprobs = ChatLogprobs(model.tokenizer) if has_logprobs else None
        self._prompt_logprobs = PromptLogprobs(model.tokenizer) if tells_prompt else None
        self._num_samples = num_samples
        self._stop_token_ids = stop_token_ids
        self._echo = ""
        self._calling: set[int] = set()
        """Samples with tool calls."""
        self._usage_field: Body = {"usage": None} if streams_usage else {}

    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the text that the answer continues to the content of each output."""
        del token_ids  # log-probabilities are those of the output
        self._echo = text

    def opening(self) -> list[Body]:
        """Returns one chunk with the role for each output."""
        opening = {
            "delta": {"role": "assistant", "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        return [
            {**self._chunk_envelope, "choices": [{"index": i, **opening}], **self._usage_field}
            for i in range(self._num_samples)
        ]

    def chunk(self, output: Output) -> Body:
        """Returns new output as a chunk."""
        choice = {
            "index": output.index,
            "delta": _delta(output),
            **self._ending(output),
        }
        return {**self._chunk_envelope, "choices": [choice], **self._usage_field}

    def usage_chunk(self, usage: Usage) -> Body:
        """Returns the chunk with the usage."""
        return {**self._chunk_envelope, "choices": [], "usage": usage_body(usage)}

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Body:
        """Returns all outputs, in the order of their indices, as one body."""
        choices = [
            {
                "index": output.index,
                "message": {"role": "assistant", **_message(output, self._echo), "refusal": None},
                **self._ending(output),
            }
            for output in outputs
        ]
        body = {**self._envelope, "choices": choices, "usage": usage_body(usage)}
        if self._prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs.of(outputs[0])
        return body

    def _ending(self, output: Output) -> Body:
        return {
            "logprobs": None if self._logprobs is None else self._logprobs.push(output),
            "finish_reason": self._finish_reason(output),
            **_stop_reason(output, self._stop_token_ids),
        }

    def _finish_reason(self, output: Output) -> str | None:
        if output.calls:
            self._calling.add(output.index)
        reason = _finish_reason(output)
        return "tool_calls" if reason == "stop" and output.index in self._calling else reason


def _delta(output: Output) -> Body:
    """Returns new output as the part of a message."""
    delta: Body = {"content": output.text} if output.text else {}
    if output.reasoning:
        delta["reasoning_content"] = output.reasoning
    if output.calls:
        delta["tool_calls"] = [
            {
                "index": call.index,
                **({"id": call.call_id, "type": "function"} if call.call_id else {}),
                "function": {
                    **({"name": call.name} if call.name else {}),
                    "arguments": call.arguments,
                },
            }
            for call in output.calls
        ]
    return delta


def _message(output: Output, echo: str) -> Body:
    """Returns a whole output as a message, after an echoed text."""
    message: Body = {"content": (echo + output.text) or (None if output.calls else "")}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in output.calls
        ]
    return message


def usage_so_far(*, prompt_tokens: int, output_tokens: int) -> Body:
    """Returns the usage of an unfinished request in tokens; how many were cached is not known."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


def usage_body(usage: Usage) -> Body:
    """Returns the usage in tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _envelope(answer_id: str, kind: str, model: ServedModel) -> Body:
    return {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model.info.model,
    }


def _finish_reason(output: Output) -> str | None:
    if output.finish_reason is None:
        return None
    return "stop" if output.finish_reason == STOP else "length"


def _stop_reason(output: Output, stop_token_ids: Collection[int]) -> Body:
    """Returns the field of an ended output with the stop string or the request's own stop token."""
    if output.finish_reason is None:
        return {}
    is_own = output.stop_token_id in stop_token_ids
    return {"stop_reason": output.stop_token_id if is_own else output.stop_string}
