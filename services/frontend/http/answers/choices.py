"""Answers with choices, which completions and chat completions share: whole or in chunks."""

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from services.frontend.engine_client.messages import STOP
from services.frontend.engine_client.messages import Usage as EngineUsage
from services.frontend.http.answers.logprobs import PromptLogprobs
from services.frontend.http.answers.weights import WeightsField, weights_of
from services.frontend.http.bodies.call import Call
from services.frontend.http.endpoint import GenerationEndpoint, Kind, Response, Serving
from services.frontend.http.wire.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Conversation, Output, Prompt, prompts_of
from services.frontend.pipeline.samples import Samples
from services.frontend.pipeline.served_model import ServedModel
from services.frontend.reply.deltas import joined_calls
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.tokenizer import Tokenizer

Body = Mapping[str, Any]


class PromptTokensDetails(TypedDict):
    """Parts of a prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Parts of an output's tokens."""

    reasoning_tokens: int


class Usage(WeightsField):
    """The usage in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Both are known at the end."""


class Envelope(TypedDict):
    """Fields of every answer with choices."""

    created: int
    model: str


class UsageField(TypedDict, total=False):
    """Null, or absent, in chunks of a stream that does not have it."""

    usage: Usage | None


class StopReason(TypedDict, total=False):
    """Field of an ended output."""

    stop_reason: str | int | None
    """The stop string, or the stop token of the request itself, that ended it."""


class ChoicesAnswer(ABC):
    """Builds the answer of one request, whole or in chunks."""

    def __init__(self, call: Call, model: ServedModel) -> None:
        sampling = call.options.sampling
        self._id = call.options.request_id
        self._envelope: Envelope = {"created": int(time.time()), "model": model.name}
        self._has_logprobs = sampling is not None and sampling.HasField("logprobs")
        self._prompt_logprobs = PromptLogprobs(model.tokenizer, are_told=call.tells_prompt)
        self._num_samples = call.options.num_samples
        self._stop_token_ids = frozenset(() if sampling is None else sampling.stop_token_ids)
        self._usage_field: UsageField = {"usage": None} if call.includes_usage else {}

    @abstractmethod
    def echo(self, text: str, token_ids: Sequence[int]) -> None:
        """Prepends the text of the next prompt, which has these tokens, to each of its outputs."""

    def opening(self) -> Sequence[Body]:
        """Returns the chunks before any output."""
        return ()

    @abstractmethod
    def chunk(self, output: Output) -> Body:
        """Returns new output as a chunk."""

    @abstractmethod
    def usage_chunk(self, usage: EngineUsage) -> Body:
        """Returns the chunk with the usage, after the last output."""

    @abstractmethod
    def whole(self, outputs: Sequence[Output], usage: EngineUsage) -> Body:
        """Returns all outputs, in the order of their indices, as one body."""

    def _stop_reason(self, output: Output) -> StopReason:
        """Returns the field of an ended output; a stop token counts if the request has it."""
        if output.finish_reason is None:
            return {}
        is_own = output.stop_token_id in self._stop_token_ids
        return {"stop_reason": output.stop_token_id if is_own else output.stop_string}


class ChoicesEndpoint(GenerationEndpoint[Call]):
    """An endpoint that answers with choices."""

    def __init__(
        self, kind: Kind[Call], serving: Serving, answer_class: type[ChoicesAnswer]
    ) -> None:
        super().__init__(kind, serving)
        self._answer_class = answer_class

    def respond(self, call: Call, writer: ResponseWriter) -> Response[Call]:
        """Begins a response; raises UnknownModelError or EngineUnavailableError."""
        return ChoicesResponse(self._answer_class, self.pipeline, call, writer)


class ChoicesResponse(Response[Call]):
    """Writes a request's output as choices."""

    def __init__(
        self,
        answer_class: type[ChoicesAnswer],
        pipeline: Pipeline,
        call: Call,
        writer: ResponseWriter,
    ) -> None:
        """Raises UnknownModelError or EngineUnavailableError if the model is not served."""
        super().__init__(pipeline, call, writer)
        self._answer_class = answer_class
        self._pipeline = pipeline
        self._answer: ChoicesAnswer
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._pieces: defaultdict[int, list[Output]] = defaultdict(list)

    async def begin(self, generation: Generation | Samples) -> None:
        """Starts the response, if it is a stream of events."""
        call = self._call
        # Only now: it allocates per sample, and n has just been checked.
        self._answer = answer = self._answer_class(call, self._model)
        self._num_prompt_tokens = sum(map(len, generation.prompts))
        if call.has_echo:
            for prompt, token_ids in zip(prompts_of(call.prompt), generation.prompts, strict=True):
                answer.echo(await self._prompt_text(prompt, token_ids), token_ids)
        if call.is_stream:
            await self._writer.start_events()
            for body in answer.opening():
                await self._write_chunk(body)

    async def add(self, output: Output) -> None:
        """Writes an event, or keeps the output for the end."""
        self._num_output_tokens += len(output.token_ids)
        if not self._call.is_stream:
            self._pieces[output.index].append(output)
        elif (
            output.text
            or output.reasoning
            or output.calls
            or output.logprobs
            or output.prompt_logprobs
            or output.finish_reason is not None
        ):
            await self._write_chunk(self._answer.chunk(output))

    async def end(self) -> None:
        """Ends the stream of events, or writes the body."""
        if self._call.is_stream:
            if self._call.includes_usage:
                await self._writer.write_event(self._answer.usage_chunk(self._usage))
            await self._writer.end_events()
            return
        outputs = [_joined(pieces) for _, pieces in sorted(self._pieces.items())]
        await self._writer.write(self._answer.whole(outputs, self._usage))

    async def _write_chunk(self, body: Body) -> None:
        if self._call.counts_usage:
            body = {**body, "usage": self._usage_so_far()}
        await self._writer.write_event(body)

    def _usage_so_far(self) -> Usage:
        """Returns the usage of an unfinished request; how many tokens were cached is not known."""
        prompt_tokens, output_tokens = self._num_prompt_tokens, self._num_output_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }

    async def _prompt_text(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """Returns a prompt as given, the text of its token ids, or a conversation's open text.

        A text that may have been cut is that of its token ids, too.
        """
        if isinstance(prompt, str) and self._call.options.truncate_prompt_tokens is None:
            return prompt
        if isinstance(prompt, Conversation):
            return prompt.open_text
        decoded = await self._pipeline.detokenize(
            "", token_ids, self._pipeline.gate.acting_account, show_special_tokens=False
        )
        return prompt_text(self._model.tokenizer, token_ids, decoded)


def usage_body(usage: EngineUsage) -> Usage:
    """Returns the usage in tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        **weights_of(usage),
    }


def finish_reason(output: Output) -> Literal["stop", "length"] | None:
    """Returns why an output ended; None until it does."""
    if output.finish_reason is None:
        return None
    return "stop" if output.finish_reason == STOP else "length"


def _joined(pieces: list[Output]) -> Output:
    """Merges the pieces of one output."""
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=joined_calls(call for piece in pieces for call in piece.calls),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[position for piece in pieces for position in piece.logprobs],
        prompt_logprobs=[position for piece in pieces for position in piece.prompt_logprobs],
    )


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], decoded: str) -> str:
    """Returns the text of a prompt of token ids, without special tokens.

    The output completes an unfinished last character. `decoded` is the library's decoding:
    sentencepiece drops the first space.
    """
    text = Detokenizer(tokenizer.token_bytes(show_special_tokens=False)).push(token_ids)
    return text[1:] if text.startswith(" ") and not decoded.startswith(" ") else text
