"""Bodies of POST /tokenize and /detokenize, and the calls in them."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.frontend.errors import InvalidRequestError
from services.frontend.http.bodies.call import Call
from services.frontend.http.chat.calls import message_of, prompt_end, tool_entry
from services.frontend.http.chat.schema import TAGS, ChatMessage, PromptEndFields, Tool
from services.frontend.http.fields.body import Body
from services.frontend.http.fields.generation import Model, TokenId
from services.frontend.http.fields.options import given_variables
from services.frontend.http.fields.parse import parse_body
from services.frontend.pipeline.request import MAX_MESSAGES, Conversation, Options
from services.frontend.pipeline.tools import MAX_TOOLS


class TokenizeRequest(PromptEndFields):
    """Body of POST /tokenize: a text, or a conversation with its tools."""

    model: Model | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    tools: (
        Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)] | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("there must be either a prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Model | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall(Call):
    """A parsed body whose prompt is to be tokenized."""

    add_special_tokens: bool | None
    """Whether the tokenizer adds special tokens; None means to text alone."""
    returns_texts: bool
    """Whether the text of each token is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall(Call):
    """A parsed body with token ids whose text is wanted."""

    token_ids: list[int]


def read_tokenize(body: bytes, request_id: str, *, is_strict: bool = False) -> TokenizeCall:
    """Parses a request for the token ids of a prompt; see `ReadCall`."""
    request = parse_body(TokenizeRequest, body, is_strict=is_strict, tags=TAGS)
    return TokenizeCall(
        tokenized_prompt(request),
        Options(
            model=request.model or "",
            request_id=request_id,
            parse_special_tokens=request.parse_special_tokens,
        ),
        prompt_field="prompt" if request.messages is None else "messages",
        add_special_tokens=request.add_special_tokens,
        returns_texts=bool(request.return_token_strs),
    )


def read_detokenize(body: bytes, request_id: str, *, is_strict: bool = False) -> DetokenizeCall:
    """Parses a request for the text of token ids; see `ReadCall`."""
    request = parse_body(DetokenizeRequest, body, is_strict=is_strict)
    return DetokenizeCall(
        "",
        Options(model=request.model or "", request_id=request_id),
        prompt_field="tokens",
        token_ids=request.tokens,
    )


def tokenized_prompt(request: TokenizeRequest) -> str | Conversation:
    """Returns the text or conversation to be tokenized.

    Raises:
        InvalidRequestError: a tool call has no name, or a text has fields of chats.
    """
    if request.messages is None:
        for field in ("tools", "chat_template_kwargs"):
            if getattr(request, field) is not None:
                raise InvalidRequestError(f"{field} needs messages", field=field)
        prompt_end(request, ())
        return request.prompt or ""
    return Conversation(
        [message_of(each) for each in request.messages],
        [tool_entry(each) for each in request.tools or ()],
        template_variables=given_variables(request.chat_template_kwargs),
        end=prompt_end(request, request.messages),
    )
