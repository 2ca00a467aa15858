"""Responses, in plain Python."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2
from services.client.requests import ToolCall


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of a request, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    """Those of the output that are reasoning."""
    weights_version: str = ""
    """Version of the weights at the last token; empty if they have no name."""
    first_weights_version: str | None = None
    """Version of the weights at the first token, if it is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The token chosen at one output position and the likeliest ones there, best first."""

    chosen: TokenLogprob
    top: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPiece:
    """More of one tool call; its first piece has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One output's news since its last chunk. The last chunk of all has `usage`."""

    request_id: str
    index: int = 0
    """Which output of the prompt this is more of; each ends with a `finish_reason` of its own."""
    text: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPiece] = ()
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None


@dataclass(slots=True, kw_only=True)
class Completion:
    """All of one answer."""

    request_id: str = ""
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, where they were asked for."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None

    def add(self, chunk: Chunk) -> None:
        """Appends the next chunk."""
        self.request_id = chunk.request_id
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for piece in chunk.tool_calls:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(id=piece.id, name=piece.name, arguments=""))
            call = self.tool_calls[piece.index]
            self.tool_calls[piece.index] = replace(call, arguments=call.arguments + piece.arguments)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        self.finish_reason = chunk.finish_reason
        self.stop_string = chunk.stop_string
        self.stop_token_id = chunk.stop_token_id
        self.usage = chunk.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token id and its text by itself, where broken characters show as U+FFFD."""

    id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that requests may name."""

    name: str
    architecture: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    ready: bool
    """Whether an engine takes requests for it now."""
    default_sampling: dict[str, float]
    """Sampling used where a request is silent."""


def chunk_of(output: frontend_pb2.Output) -> Chunk:
    """Reads one message of output."""
    return Chunk(
        request_id=output.request_id,
        index=output.index,
        text=output.text,
        reasoning=output.reasoning,
        tool_calls=tuple(
            ToolCallPiece(
                index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments
            )
            for piece in output.tool_calls
        ),
        token_ids=tuple(output.token_ids),
        logprobs=tuple(_position(item) for item in output.logprobs),
        prompt_logprobs=tuple(_position(item) for item in output.prompt_logprobs),
        finish_reason=_finish_reason(output.finish_reason),
        stop_string=output.stop_string if output.HasField("stop_string") else None,
        stop_token_id=output.stop_token_id if output.HasField("stop_token_id") else None,
        usage=usage_of(output.usage) if output.HasField("usage") else None,
    )


def usage_of(usage: sampling_pb2.Usage) -> Usage:
    """Reads what a request cost."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        weights_version=usage.weights_version,
        first_weights_version=(
            usage.first_weights_version if usage.HasField("first_weights_version") else None
        ),
    )


def model_card_of(card: frontend_pb2.ModelCard) -> ModelCard:
    """Reads what the frontend says of a model."""
    sampling = card.default_sampling
    return ModelCard(
        name=card.name,
        architecture=card.architecture,
        max_model_len=card.max_model_len,
        ready=card.ready,
        default_sampling={
            descriptor.name: value
            for descriptor, value in sampling.ListFields()
            if isinstance(value, int | float)
        },
    )


def _finish_reason(value: int) -> FinishReason | None:
    if value == sampling_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    name = sampling_pb2.FinishReason.Name(value)
    return FinishReason[name.removeprefix("FINISH_REASON_")]


def _position(position: sampling_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_token_logprob(position.chosen),
        top=tuple(_token_logprob(item) for item in position.top),
    )


def _token_logprob(item: sampling_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=item.token_id, logprob=item.logprob)
