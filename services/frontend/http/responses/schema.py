"""Bodies of POST /v1/responses: input, tools and options."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from services.frontend.http.fields.body import TAKEN, Body
from services.frontend.http.fields.generation import Count, GenerationFields, JsonSchema, Model
from services.frontend.http.responses.item_schema import ITEM_TAGS, MESSAGE, Items, as_list
from services.frontend.http.responses.tool_schema import TOOL_TAGS, ToolChoice, Tools

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
ENCRYPTED = "reasoning.encrypted_content"
"""The entry of `include` that asks for encrypted reasoning, which is given as plain text."""

Label = Annotated[str, Field(max_length=512)]
"""A text that responses repeat."""
Effort = Annotated[str, Field(min_length=1, max_length=64)]


class PlainFormat(Body):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """Options of the text."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Options of the reasoning, which is always given in full."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Literal["auto"] | None, TAKEN] = None
    """Which turns' reasoning the model sees; the chat template decides."""
    mode: Annotated[Literal["standard"] | None, TAKEN] = None


class EventOptions(Body):
    """Options of a stream; events are never padded."""

    include_obfuscation: bool | None = None


class CacheOptions(Body):
    """Options of the prompt cache, which keeps every full block of a prompt anyway."""

    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: Literal[False] | None = None


class ResponsesRequest(GenerationFields):
    """Body of POST /v1/responses."""

    input: Annotated[Items, as_list(MESSAGE, Items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_reasoning_tokens: Count | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                ]
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    """Entries about hosted tools and images change nothing: there are none."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Literal[False] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """A limit of tools that the server runs; it runs none."""
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    stream_options: EventOptions | None = None
    user: Label | None = None
    client_metadata: Annotated[dict[str, Any] | None, TAKEN] = None
    prompt_cache_options: Annotated[CacheOptions | None, TAKEN] = None

    @field_validator("include")
    @classmethod
    def _refuse_if_strict(cls, entries: list[str] | None, info: ValidationInfo) -> list[str] | None:
        for entry in entries or () if info.context else ():
            if entry not in (LOGPROBS, ENCRYPTED):
                raise PydanticCustomError("octavo_include", f"{entry} is not supported")
        return entries


class InputTokensRequest(ResponsesRequest):
    """Body of POST /v1/responses/input_tokens."""

    model: Model = ""
    input: Annotated[Items, as_list(MESSAGE, Items)] = Field(default_factory=list)


TAGS = ITEM_TAGS | TOOL_TAGS
"""Names of alternatives, which pydantic puts into the path of an error."""
