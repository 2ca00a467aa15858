"""Requests, in plain Python."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2
from services.client.errors import InvalidRequestError
from services.client.structured_output import StructuredOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call, in the form that its chat template asks for."""

    name: str
    description: str = ""
    parameters: str | None = None
    """JSON Schema of the parameters, as JSON text."""
    strict: bool | None = None
    """Whether arguments follow the schema exactly."""

    def to_proto(self) -> frontend_pb2.Tool:
        """Returns the wire form."""
        return frontend_pb2.Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    id: str = ""
    name: str
    arguments: str
    """The text of a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    """The speaker, such as system, user or assistant."""
    content: str = ""
    """The text."""
    images: Sequence[bytes] = ()
    """Files of images before the text; only in the user's messages and results of tools."""
    tool_calls: Sequence[ToolCall] = ()
    """Tools that the model called; only in the assistant's messages."""
    tool_call_id: str | None = None
    """The call that a message of the role "tool" answers."""
    reasoning: str | None = None
    """The reasoning before an earlier answer; only in the assistant's messages."""

    def to_proto(self) -> frontend_pb2.ChatMessage:
        """Returns the wire form."""
        parts = [frontend_pb2.ContentPart(image=image) for image in self.images]
        if parts and self.content:
            parts.append(frontend_pb2.ContentPart(text=self.content))
        return frontend_pb2.ChatMessage(
            role=self.role,
            content="" if parts else self.content,
            parts=parts,
            tool_calls=[
                frontend_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in self.tool_calls
            ],
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. None means the model's default; 0 is a value.

    The texts are also the help of the command line's flags of the same names.
    """

    max_tokens: Annotated[
        int | None, "Most output tokens; the context length bounds it anyway."
    ] = None
    temperature: Annotated[float | None, "Divides the logits; 0 is greedy. 0 to 100."] = None
    top_k: Annotated[int | None, "Keep the k most likely tokens; 0 keeps all."] = None
    top_p: Annotated[float | None, "Keep the likeliest tokens that sum to this. Up to 1."] = None
    min_p: Annotated[float | None, "Drop tokens below this share of the likeliest one."] = None
    repetition_penalty: Annotated[
        float | None, "Above 1 discourages tokens already in prompt or output. 0.0625 to 10."
    ] = None
    frequency_penalty: Annotated[
        float | None, "Taken off a logit for each time its token was generated. -2 to 2."
    ] = None
    presence_penalty: Annotated[
        float | None, "Taken off a logit once its token was generated. -2 to 2."
    ] = None
    seed: Annotated[int | None, "Seed of the random numbers; repeats an answer up to rounding."] = (
        None
    )
    logprobs: Annotated[
        int | None, "Report log-probabilities of each token and of this many likeliest ones."
    ] = None
    prompt_logprobs: Annotated[
        int | None, "Report the same of each prompt token but the first; computes all of them."
    ] = None
    min_tokens: Annotated[int | None, "Output tokens before which nothing may end."] = None
    ignore_eos: Annotated[bool | None, "Go on past the model's end-of-sequence tokens."] = None
    num_speculative_tokens: Annotated[
        int | None, "Most draft tokens in a step; 0 for none. The output is the same."
    ] = None
    stop_token_ids: Annotated[Sequence[int], "Token id that ends the output; repeatable."] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    structured_output: StructuredOutput | None = None
    """The form that the output must have."""

    def to_proto(self) -> sampling_pb2.SamplingParams:
        """Returns the wire form, with only the fields that are set.

        Raises:
            InvalidRequestError: a value does not fit its field.
        """
        params = sampling_pb2.SamplingParams()
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, StructuredOutput):
                params.structured_output.CopyFrom(value.to_proto())
            elif value is not None:
                with fits(item.name, value):
                    params.MergeFrom(sampling_pb2.SamplingParams(**{item.name: value}))
        return params


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about a request but its prompt. None and empty mean the server's defaults."""

    sampling: Sampling = field(default_factory=Sampling)
    stop: Annotated[Sequence[str], "Text that ends the output and is left out; repeatable."] = ()
    show_stop: Annotated[bool | None, "Show the stop string at the end of the text."] = None
    model: Annotated[str, "The model wanted; empty means the one served."] = ""
    request_id: Annotated[str, "Names the request in the servers' logs; drawn when empty."] = ""
    priority: Annotated[int, "Higher runs first."] = 0
    cache_salt: Annotated[str, "Requests with different salts share no cached blocks."] = ""
    show_special_tokens: Annotated[bool | None, "Show special tokens in the text."] = None
    parse_special_tokens: Annotated[
        bool | None, "Whether spellings of special tokens in your text are those tokens."
    ] = None
    n: Annotated[int | None, "Outputs of the prompt; their seeds follow each other."] = None

    def to_proto(self) -> frontend_pb2.GenerationOptions:
        """Returns the wire form.

        Raises:
            InvalidRequestError: a value does not fit its field.
        """
        options = frontend_pb2.GenerationOptions(
            model=self.model,
            request_id=self.request_id,
            sampling=self.sampling.to_proto(),
            stop=self.stop,
            show_stop=self.show_stop,
            cache_salt=self.cache_salt,
            show_special_tokens=self.show_special_tokens,
            parse_special_tokens=self.parse_special_tokens,
        )
        with fits("priority", self.priority):
            options.priority = self.priority
        if self.n is not None:
            with fits("n", self.n):
                options.n = self.n
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Rules for a chat's reply. None and empty mean the server's defaults."""

    tool_choice: Annotated[
        str, "Tools to call: auto, none, required (one or more), or the name of one."
    ] = "auto"
    parallel_tool_calls: Annotated[bool | None, "Whether a reply may have several calls."] = None
    reasoning_effort: Annotated[
        str | None,
        "How much the model reasons, in its chat template's words, such as low; or none.",
    ] = None
    max_reasoning_tokens: Annotated[
        int | None, "Tokens after which reasoning ends and the answer follows; 0 to 4294967295."
    ] = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    continues_last_message: bool = False
    """Whether the reply continues the last message, the assistant's, instead of answering it."""

    def add_to(self, request: frontend_pb2.ChatRequest) -> None:
        """Sets the fields of a request.

        Raises:
            InvalidRequestError: a value does not fit its field, or two contradict each other.
        """
        match self.tool_choice:
            case "auto":
                pass
            case "none":
                request.tool_use = frontend_pb2.TOOL_USE_NONE
            case "required":
                request.tool_use = frontend_pb2.TOOL_USE_REQUIRED
            case name:
                request.required_tool = name
        if self.continues_last_message:
            request.prompt_end = frontend_pb2.PROMPT_END_LAST_MESSAGE
        if self.parallel_tool_calls is not None:
            request.parallel_tool_calls = self.parallel_tool_calls
        if self.max_reasoning_tokens is not None:
            with fits("max_reasoning_tokens", self.max_reasoning_tokens):
                request.max_reasoning_tokens = self.max_reasoning_tokens
        variables = self._variables()
        if variables:
            request.template_variables = json.dumps(variables, ensure_ascii=False)

    def _variables(self) -> dict[str, Any]:
        variables, effort = dict(self.template_variables), self.reasoning_effort
        if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequestError(
                "reasoning_effort and template_variables contradict each other",
                code="INVALID_ARGUMENT",
            )
        return variables


def generate_request(prompt: str | Sequence[int], options: Options) -> frontend_pb2.GenerateRequest:
    """Returns the wire form of a prompt given as text or as token ids."""
    request = frontend_pb2.GenerateRequest(options=options.to_proto())
    if isinstance(prompt, str):
        request.text = prompt
    else:
        with fits("a token id of the prompt", prompt):
            request.tokens.ids.extend(prompt)
    return request


def chat_request(
    messages: Sequence[Message],
    options: Options,
    tools: Sequence[Tool] = (),
    reply: Reply | None = None,
) -> frontend_pb2.ChatRequest:
    """Returns the wire form of a conversation.

    Raises:
        InvalidRequestError: a value does not fit its field.
    """
    request = frontend_pb2.ChatRequest(
        options=options.to_proto(),
        messages=[item.to_proto() for item in messages],
        tools=[item.to_proto() for item in tools],
    )
    (reply or Reply()).add_to(request)
    return request


@contextmanager
def fits(name: str, value: object) -> Iterator[None]:
    """Turns protobuf's complaint about a number that a field cannot hold into our own error."""
    try:
        yield
    except ValueError:
        shown = value if isinstance(value, int | float) else "out of range"
        raise InvalidRequestError(
            f"{name} is {shown}, which its field cannot hold", code="INVALID_ARGUMENT"
        ) from None
