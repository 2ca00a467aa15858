"""Bodies of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from services.frontend.http.fields.body import Body
from services.frontend.http.fields.generation import Count, SharedFields
from services.frontend.http.fields.images import Detail
from services.frontend.http.fields.inert import CachedBody, NeutralChatFields
from services.frontend.pipeline.request import MAX_MESSAGES
from services.frontend.pipeline.tools import MAX_TOOLS


class TextPart(CachedBody):
    """A text in a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image: a data: URL, or where to fetch it."""

    url: str
    detail: Detail | None = None


class ImageUrlPart(CachedBody):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImageUrlPart, Field(discriminator="type")]
TAGS = frozenset({"text", "image_url"})
"""Names of alternatives, which pydantic puts into the path of an error."""


class FunctionCall(Body):
    """A function call of the model, with its arguments as JSON text; no text is no arguments."""

    name: str
    arguments: str | None = None


class ToolCall(Body):
    """A previous tool call of the model."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: Annotated[int, Field(ge=0)] | None = None
    """Number of a call that was put together from a stream; the order in the list counts."""


class FunctionDefinition(Body):
    """A function for the model to call."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool for the model to call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class PromptEndFields(Body):
    """Where the prompt of a conversation ends, with the names of transformers."""

    add_generation_prompt: bool | None = None
    """Absent: unless the last message is continued."""
    continue_final_message: bool | None = None


class ChatMessage(Body):
    """One message; an assistant's may have tool calls instead of content."""

    role: str
    name: str | None = None
    """For the chat template, which may show it."""
    content: (
        str | Annotated[list[ContentPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = (
        None
    )
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for it, as some servers call it."""
    prefix: bool | None = None
    """Makes the reply continue the last message, as `continue_final_message` does."""
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    """OpenAI's own responses carry an empty list."""

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        both = (self.reasoning, self.reasoning_content)
        if None not in both and both[0] != both[1]:
            raise ValueError("reasoning and reasoning_content are one field; they must be equal")
        said = (self.content, self.reasoning_content, self.reasoning)
        if not self.tool_calls and said == (None, None, None):
            raise ValueError("a message must have content, or tool_calls")
        return self


class ChatCompletionRequest(SharedFields, PromptEndFields, NeutralChatFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """An empty list is the same as none."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    """A variable for the chat template, where that knows it."""
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    prediction: dict[str, Any] | None = None
    """A guess of the output, which may only save time; not used."""
    max_reasoning_tokens: Count | None = None
    echo: bool | None = None
    """Whether the answer begins with the content that it continues."""
