"""Answers of POST /v1/chat/completions, whole or in chunks."""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.engine_client.messages import Usage as EngineUsage
from services.frontend.http.answers.choices import (
    ChoicesAnswer,
    Envelope,
    StopReason,
    Usage,
    UsageField,
    finish_reason,
    usage_body,
)
from services.frontend.http.answers.logprobs import ChatLogprobs, PromptField
from services.frontend.http.bodies.call import Call
from services.frontend.pipeline.request import Output
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.reply.deltas import CallPiece

FinishReason = Literal["stop", "length", "tool_calls"]


class CalledFunction(TypedDict):
    """The function of a tool call, or the new part of its arguments."""

    name: NotRequired[str]
    arguments: str


class CalledTool(TypedDict):
    """A tool call; `index` is in chunks."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class AnswerMessage(TypedDict, total=False):
    """A message of the model, or its new part."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    tool_calls: list[CalledTool]
    refusal: None


class ChatChoice(StopReason):
    """One output of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(Envelope, PromptField):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(StopReason):
    """New output of a chat completion."""

    index: int
    delta: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Envelope, UsageField):
    """The data of one event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ChatAnswer(ChoicesAnswer):
    """Answers POST /v1/chat/completions."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        super().__init__(call, model)
        self._logprobs = ChatLogprobs(model.tokenizer) if self._has_logprobs else None
        self._echo = ""
        self._calling: set[int] = set()
        """Samples with tool calls."""

    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the text that the answer continues to the content of each output."""
        del token_ids  # log-probabilities are those of the output
        self._echo = text

    def opening(self) -> list[ChatCompletionChunk]:
        """Returns one chunk with the role for each output."""
        return [
            self._chunk(
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": self._echo},
                    "logprobs": None,
                    "finish_reason": None,
                }
            )
            for index in range(self._num_samples)
        ]

    def chunk(self, output: Output) -> ChatCompletionChunk:
        """Returns new output as a chunk."""
        return self._chunk(
            {
                "index": output.index,
                "delta": _delta(output),
                "logprobs": self._logprobs_of(output),
                "finish_reason": self._finish_reason(output),
                **self._stop_reason(output),
            }
        )

    def usage_chunk(self, usage: EngineUsage) -> ChatCompletionChunk:
        """Returns the chunk with the usage."""
        return self._chunk(usage={"usage": usage_body(usage)})

    def whole(self, outputs: Sequence[Output], usage: EngineUsage) -> ChatCompletion:
        """Returns all outputs, in the order of their indices, as one body."""
        return {
            "id": self._id,
            "object": "chat.completion",
            **self._envelope,
            "choices": [self._choice(output) for output in outputs],
            "usage": usage_body(usage),
            **self._prompt_logprobs.field(outputs[0]),
        }

    def _chunk(
        self, *choices: ChatChunkChoice, usage: UsageField | None = None
    ) -> ChatCompletionChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            **self._envelope,
            "choices": list(choices),
            **(self._usage_field if usage is None else usage),
        }

    def _choice(self, output: Output) -> ChatChoice:
        reason = self._finish_reason(output)
        assert reason is not None, "a whole output has ended"
        return {
            "index": output.index,
            "message": _message(output, self._echo),
            "logprobs": self._logprobs_of(output),
            "finish_reason": reason,
            **self._stop_reason(output),
        }

    def _logprobs_of(self, output: Output) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs.push(output)

    def _finish_reason(self, output: Output) -> FinishReason | None:
        if output.calls:
            self._calling.add(output.index)
        reason = finish_reason(output)
        return "tool_calls" if reason == "stop" and output.index in self._calling else reason


def _delta(output: Output) -> AnswerMessage:
    """Returns new output as the part of a message."""
    delta: AnswerMessage = {"content": output.text} if output.text else {}
    if output.reasoning:
        delta["reasoning_content"] = output.reasoning
    if output.calls:
        delta["tool_calls"] = [{"index": call.index, **_called(call)} for call in output.calls]
    return delta


def _message(output: Output, echo: str) -> AnswerMessage:
    """Returns a whole output as a message, after an echoed text."""
    content = (echo + output.text) or (None if output.calls else "")
    message: AnswerMessage = {"role": "assistant", "content": content}
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if output.calls:
        message["tool_calls"] = [_called(call) for call in output.calls]
    message["refusal"] = None
    return message


def _called(call: CallPiece) -> CalledTool:
    """Returns a tool call, or the next part of its arguments."""
    if not call.call_id:
        return {"function": {"arguments": call.arguments}}
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
