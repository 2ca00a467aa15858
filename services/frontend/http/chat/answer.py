"""Answers of POST /v1/chat/completions, whole or in chunks."""

from collections.abc import Collection, Sequence

from services.frontend.engine_client.messages import Usage
from services.frontend.http.answers.choices import (
    Body,
    envelope,
    finish_reason,
    stop_reason,
    usage_body,
)
from services.frontend.http.answers.logprobs import ChatLogprobs, PromptLogprobs
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.served_model import ServedModel


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
        self._envelope = envelope(answer_id, "chat.completion", model)
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
            **stop_reason(output, self._stop_token_ids),
        }

    def _finish_reason(self, output: Output) -> str | None:
        if output.calls:
            self._calling.add(output.index)
        reason = finish_reason(output)
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
