"""Tools of requests for responses, and the choice among them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.frontend.http.fields.body import TAKEN, Body
from services.frontend.http.fields.hosted_tools import hosted_kind
from services.frontend.pipeline.request_counts import HOSTED_KINDS
from services.frontend.pipeline.tools import MAX_TOOLS

MAX_NAME_CHARACTERS = 64
_HOSTED = "hosted"
_CHOICES = ("auto", "function", "custom", "allowed_tools", _HOSTED)
_UNTYPED = "untyped"

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Callers = Annotated[
    list[Literal["direct", "programmatic"]] | None, Field(min_length=1, max_length=2), TAKEN
]
"""The callers of a tool; code of the model does not run here and calls none."""


def type_of(value: Any) -> str:
    """Returns the type that an object says it has, for an error if it says none."""
    told = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return told if isinstance(told, str) else _UNTYPED


def only_types(*known: str) -> BeforeValidator:
    """Refuses objects of types that are neither known nor those of hosted tools."""

    def check(value: Any) -> Any:
        told = type_of(value)
        if told not in known and not hosted_kind(told):
            raise PydanticCustomError(
                "octavo_type",
                "{shown} is not supported here; {known} are",
                {"shown": repr(told[:64]), "known": ", ".join(known)},
            )
        return value

    return BeforeValidator(check)


class FunctionTool(Body):
    """A function for the model to call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[bool | None, TAKEN] = None
    """Whether a search is to find it; the model gets it at once."""
    allowed_callers: Callers = None
    output_schema: Annotated[dict[str, Any] | None, TAKEN] = None


class PlainInput(Body):
    """Any text."""

    type: Literal["text"]


class GrammarInput(Body):
    """Text that follows a grammar."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1)]


class CustomTool(Body):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[PlainInput | GrammarInput, Field(discriminator="type")] | None = None
    defer_loading: Annotated[bool | None, TAKEN] = None
    allowed_callers: Callers = None

    @property
    def grammar(self) -> GrammarInput | None:
        """The grammar of its input."""
        return self.format if isinstance(self.format, GrammarInput) else None


class HostedTool(BaseModel):
    """A tool of the vendor's own servers, whose fields are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    type: Annotated[str, Field(pattern=rf"^({'|'.join(HOSTED_KINDS)})(_|$)")]

    @property
    def kind(self) -> str:
        """Its kind, without a version."""
        return hosted_kind(self.type) or self.type


OwnTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Body):
    """Several tools of one name space."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[OwnTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _tool_type(value: Any) -> str:
    told = type_of(value)
    return told if hosted_kind(told) is None else _HOSTED


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag(_HOSTED)],
    Discriminator(_tool_type),
    only_types("function", "custom", "namespace"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class FunctionChoice(Body):
    """A function that the model must call, or that it may call."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class CustomChoice(Body):
    """A tool with a text as its input that the model must call, or that it may call."""

    type: Literal["custom"]
    name: str
    namespace: str | None = None


Chosen = FunctionChoice | CustomChoice
_AnyChosen = Annotated[
    Annotated[FunctionChoice, Tag("function")]
    | Annotated[CustomChoice, Tag("custom")]
    | Annotated[HostedTool, Tag(_HOSTED)],
    Discriminator(_tool_type),
    only_types("function", "custom"),
]


class AllowedTools(Body):
    """The tools that the model gets, of all that are listed."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_AnyChosen], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def own(self) -> Sequence[Chosen]:
        """The tools that are not hosted."""
        return [each for each in self.tools if not isinstance(each, HostedTool)]


def _choice_type(value: Any) -> str:
    return "auto" if isinstance(value, str) else _tool_type(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("auto")]
    | Annotated[FunctionChoice, Tag("function")]
    | Annotated[CustomChoice, Tag("custom")]
    | Annotated[AllowedTools, Tag("allowed_tools")]
    | Annotated[HostedTool, Tag(_HOSTED)],
    Discriminator(_choice_type),
]

TOOL_TAGS = frozenset((*_CHOICES, "namespace", "text", "grammar"))
"""Names of alternatives, which pydantic puts into the path of an error."""
