"""The tools that the model gets for a request: all of them are functions to it.

A tool in a name space is a function NAMESPACE__NAME. A custom tool is a function with one string,
`input`. Calls get their names and kinds back by `CallName`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.frontend.engine_client.messages import StructuredOutput
from services.frontend.errors import InvalidRequestError
from services.frontend.http.fields.hosted_tools import check_hosted
from services.frontend.http.responses.schema import ResponsesRequest
from services.frontend.http.responses.tool_schema import (
    AllowedTools,
    Chosen,
    CustomChoice,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    GrammarInput,
    HostedTool,
    NamespaceTool,
)
from services.frontend.pipeline.tools import tool_of
from services.frontend.reply.call_rules import CallRules
from services.frontend.text.chat_template import Message
from services.frontend.text.surrogates import without_halves

INPUT = "input"
"""The parameter of a custom tool's function."""
_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class CallName:
    """The names by which the caller knows a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request."""

    tools: Sequence[Message]
    """The functions, as chat templates have them."""
    rules: CallRules
    names: Mapping[str, CallName] = field(default_factory=dict)
    """The caller's names of tools by those of their functions."""
    left_out: Sequence[str] = ()
    """Kinds of hosted tools that the model does not get."""
    demanded: CallName | None = None
    """The custom tool whose input, by its grammar, is all of the reply."""
    form: StructuredOutput | None = None
    """The grammar of that input."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A tool of the caller, under the name that the model knows."""

    name: str
    tool: FunctionTool | CustomTool
    namespace: str | None = None
    about: str = ""
    """Describes the name space, in its first tool."""

    @property
    def call_name(self) -> CallName:
        return CallName(self.tool.name, self.namespace, isinstance(self.tool, CustomTool))

    @property
    def grammar(self) -> GrammarInput | None:
        return self.tool.grammar if isinstance(self.tool, CustomTool) else None

    def message(self) -> Message:
        """Returns the function as chat templates have it."""
        tool = self.tool
        texts = [self.about, tool.description or ""]
        if isinstance(tool, FunctionTool):
            parameters = tool.parameters
        else:
            parameters = _input_schema(tool)
            texts.append(_input_note(tool))
        return tool_of(self.name, "\n\n".join(filter(None, texts)), parameters)


def qualified_name(name: str, namespace: str | None) -> str:
    """Returns the name that the model knows for a tool in a name space."""
    if not namespace:
        return name
    return namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name


def custom_arguments(text: str) -> str:
    """Returns the arguments of a custom tool's function, for its input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Returns a custom tool's input, or arguments of another form as the model wrote them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return without_halves(text) if isinstance(text, str) else arguments


def offered_tools(request: ResponsesRequest, *, is_strict: bool) -> OfferedTools:
    """Returns the tools that the model gets, and the rules for its calls.

    Raises:
        InvalidRequestError: two tools have one name, a chosen one is missing, or what is demanded
            cannot be.
    """
    choice = request.tool_choice
    left_out = _left_out(request, is_strict=is_strict)
    if choice == "none":
        return OfferedTools(tools=(), rules=CallRules(), left_out=left_out)
    functions = list(_functions_of(request))
    is_required = choice == "required"
    named: _Function | None = None
    match choice:
        case FunctionChoice() | CustomChoice():
            named = _chosen(choice, functions, "names")
            is_required = True
        case AllowedTools():
            is_required = choice.mode == "required"
            kept = [_chosen(each, functions, "allows") for each in choice.own]
            functions = [each for each in functions if each in kept]
    tools = [each.message() for each in functions]
    names = {each.name: each.call_name for each in functions}
    if is_required:
        named = functions[0] if named is None and len(functions) == 1 else named
        if named is not None and named.grammar is not None:
            return OfferedTools(
                tools=tools,
                rules=CallRules(),
                left_out=left_out,
                demanded=named.call_name,
                form=_form_of(named.grammar),
            )
        if named is None:
            _check_all_followed(functions)
    is_named = isinstance(choice, Chosen)
    rules = CallRules(
        is_required=is_required,
        name=named.name if named is not None and is_named else "",
        is_single=bool(tools)
        and (isinstance(choice, Chosen) or request.parallel_tool_calls is False),
        strict=frozenset(
            each.name
            for each in functions
            if isinstance(each.tool, FunctionTool) and each.tool.strict
        ),
    )
    return OfferedTools(tools=tools, rules=rules, names=names, left_out=left_out)


def _left_out(request: ResponsesRequest, *, is_strict: bool) -> Sequence[str]:
    """Returns the kinds of hosted tools that are left out.

    Raises:
        InvalidRequestError: there are no others, or one is demanded.
    """
    tools, choice = request.tools or (), request.tool_choice
    hosted = [each.kind for each in tools if isinstance(each, HostedTool)]
    has_others = len(hosted) < len(tools)
    if isinstance(choice, AllowedTools):
        has_others = bool(choice.own)
        hosted += [
            each.kind
            for each in choice.tools
            if isinstance(each, HostedTool) and each.kind not in hosted
        ]
    demanded = choice.kind if isinstance(choice, HostedTool) else None
    return check_hosted(hosted, has_others=has_others, demanded=demanded, is_strict=is_strict)


def _functions_of(request: ResponsesRequest) -> Iterator[_Function]:
    """Yields the tools under the names that the model knows.

    Raises:
        InvalidRequestError: two have one name.
    """
    known: set[str] = set()
    for each in request.tools or ():
        match each:
            case FunctionTool() | CustomTool():
                found = [_Function(each.name, each)]
            case NamespaceTool():
                abouts = [each.description or "", *[""] * len(each.tools)]
                found = [
                    _Function(qualified_name(tool.name, each.name), tool, each.name, about)
                    for tool, about in zip(each.tools, abouts, strict=False)
                ]
            case _:
                found = []
        for function in found:
            if function.namespace and function.name in known:
                raise InvalidRequestError(
                    f"tools: two are known to the model as {function.name!r}", field="tools"
                )
            known.add(function.name)
            yield function


def _chosen(choice: Chosen, functions: Sequence[_Function], verb: str) -> _Function:
    """Returns the tool that a choice means.

    Raises:
        InvalidRequestError: there is none.
    """
    is_custom = isinstance(choice, CustomChoice)
    for each in functions:
        name = each.call_name
        is_kind = name.is_custom is is_custom
        if is_kind and choice.name == each.name and choice.namespace is None:
            return each
        if is_kind and choice.name == name.name and choice.namespace in (None, name.namespace):
            return each
    raise InvalidRequestError(
        f"tool_choice {verb} {choice.name[:64]!r}, which is not among the tools",
        field="tool_choice",
    )


def _check_all_followed(functions: Sequence[_Function]) -> None:
    """Refuses a demand that may be met by a tool whose grammar calls cannot follow."""
    for each in functions:
        if each.grammar is not None and each.grammar.syntax == "lark":
            raise InvalidRequestError(
                f"tool_choice: a call is demanded, and {each.name!r} has a Lark grammar; name the"
                " tool, or offer it alone",
                field="tool_choice",
            )


def _form_of(grammar: GrammarInput) -> StructuredOutput:
    if grammar.syntax == "regex":
        return StructuredOutput(regex=grammar.definition)
    return StructuredOutput(lark=grammar.definition)


def _input_schema(tool: CustomTool) -> dict[str, Any]:
    """Returns the parameters of a custom tool's function."""
    schema: dict[str, Any] = {"type": "string"}
    if tool.grammar is not None and tool.grammar.syntax == "regex":
        schema["pattern"] = f"^(?:{tool.grammar.definition})$"
    return {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _input_note(tool: CustomTool) -> str:
    """Returns the sentences that explain the input to the model."""
    if tool.grammar is None:
        return f"`{INPUT}` is free text."
    kind = "Lark grammar" if tool.grammar.syntax == "lark" else "regular expression"
    return f"`{INPUT}` is text that follows this {kind}:\n{tool.grammar.definition}"
