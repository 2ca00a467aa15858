"""Renders a conversation into a prompt.

Templates are programs. The sandbox limits them to text but not in time, so they run in a process
that can be killed; see `template_process`.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from services.frontend.text.content_marks import ContentMarker
from services.frontend.text.content_parts import has_images
from services.frontend.text.prompt_end import LostTextError, OpenText, PromptEnd
from services.frontend.text.stand_ins import (
    with_results_as_user,
    with_system_as_user,
    with_written_tools,
)
from services.frontend.text.template_environment import TemplateEnvironment, text_constants
from services.frontend.text.template_forms import TemplateForms

Message = Mapping[str, Any]
"""A message of a conversation, or a tool, with the keys that templates expect."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's reasoning in templates."""
REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns reasoning on or off in templates."""
_DEVELOPER, _SYSTEM = "developer", "system"
"""A template that does not know the first role gets the second."""
_EFFORT, _NO_EFFORT = "reasoning_effort", "none"
"""A variable and its value that turn the reasoning off, also in templates that do not know it."""
_HINTS = frozenset({"verbosity"})
"""Variables that are left out where the template does not know them."""
_WISHES = frozenset({*_HINTS, _EFFORT, *REASONING_SWITCHES})
"""The same variables where nothing else that a template cannot follow is refused either."""
_MAX_PROBE_BYTES = 2**20
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template's expressions may raise."""


class TemplateError(Exception):
    """A template is invalid, refuses a conversation, or fails on it."""


class ChatTemplate:
    """A model's chat template in a sandbox, with what templates on model hubs expect.

    `messages`, `tools` and `documents` (None if absent), `add_generation_prompt`, special tokens,
    `raise_exception`, `strftime_now`, `tojson` without escaping, `break`, `continue`, `generation`.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        *,
        special_tokens: Sequence[str] = (),
        is_strict: bool = True,
        writes_tools: bool = False,
    ) -> None:
        """Compiles a template.

        Args:
            source: the template.
            variables: its variables beside the conversation.
            special_tokens: the spellings of the tokenizer's special tokens.
            is_strict: refuses what the template cannot follow, instead of leaving it out.
            writes_tools: writes tools and calls as text where the template has none.

        Raises:
            TemplateError: the source is not valid Jinja.
        """
        self._environment = TemplateEnvironment()
        try:
            syntax = self._environment.parse(source)
            self._known = jinja2.meta.find_undeclared_variables(syntax)
            self.takes_tools = "tools" in self._known
            """Whether the template uses tools."""
            self.takes_tool_calls = "tool_calls" in source
            """Whether it uses tool calls of the assistant."""
            constants = set(text_constants(syntax))
            self._reasoning_key = next((key for key in _REASONING_KEYS if key in constants), None)
            self._knows_developer = _DEVELOPER in constants
            self._marker = ContentMarker(special_tokens, constants)
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is wrong in line {error.lineno}: {error.message}"
            ) from None
        except (ArithmeticError, RecursionError, SyntaxError, TypeError, ValueError) as error:
            # Jinja folds constants at compile time, and Python's compiler has limits.
            raise TemplateError(f"the chat template cannot be compiled: {error}") from None
        self._source = source
        self._is_strict = is_strict
        self._writes_tools = writes_tools
        self._hints = _HINTS if is_strict else _WISHES
        self._variables = dict(variables)
        self._forms = TemplateForms(self._probe)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] = (),
        variables: Mapping[str, Any] | None = None,
        reasons: bool | None = None,
        end: PromptEnd = PromptEnd.ANSWER,
        max_bytes: int,
        marks_content: bool = False,
    ) -> str:
        """Returns the prompt for the answer to a conversation.

        Args:
            messages: the conversation; arguments of tool calls are JSON text, and contents with
                images are lists of parts.
            tools: tools for the model.
            variables: the caller's variables for the template.
            reasons: turns the reasoning on or off where the template has a variable for it.
            end: where the prompt ends.
            max_bytes: limit of the prompt without marks.
            marks_content: returns a mark, then the prompt with marked caller text.

        Raises:
            TemplateError: the template fails, refuses or ignores its input, or renders too much.
        """
        variables = {
            name: value
            for name, value in (variables or {}).items()
            if name in self._known or name not in self._hints
        }
        messages, tools = self._with_stand_ins(messages, tools)
        self._check_tools(messages, tools)
        self._check_images(messages)
        if reasons is not None:
            variables = self._with_switch(variables, reasons=reasons)
        self._check_variables(variables)
        mark = ""
        try:
            text = OpenText(messages) if end is PromptEnd.LAST_MESSAGE else None
            fitted = self._forms.fit(messages)
            shown_tools = self._forms.fit_tools(tools)
            if marks_content:
                mark = self._marker.free_mark(fitted, shown_tools, variables, self._source)
                fitted = self._marker.marked(fitted, mark)
                shown_tools = self._marker.marked(shown_tools, mark)
                variables = self._marker.marked(variables, mark)
        except RecursionError:
            raise TemplateError("the conversation is nested too deeply") from None
        except ValueError as error:
            raise TemplateError(str(error)) from None
        self._environment.mark = mark
        try:
            if text is not None:
                fitted = text.tagged(fitted)
            prompt = self._generate(fitted, shown_tools, variables, max_bytes, end=end)
            return mark + (prompt if text is None else text.cut(prompt, mark))
        except (LostTextError, TemplateError) as error:
            # The template's text may repeat the caller's.
            told = str(error) if text is None else text.untagged(str(error))
            raise TemplateError(told.replace(mark, "") if mark else told) from None

    def set_time(self, now: datetime.datetime) -> None:
        """Sets the local time for what is rendered next; at first it is that of compilation."""
        self._environment.now = now

    def _generate(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        variables: Mapping[str, Any],
        max_bytes: int,
        *,
        end: PromptEnd = PromptEnd.ANSWER,
    ) -> str:
        mark = self._environment.mark
        pieces = []
        num_bytes = 0
        try:
            for piece in self._template.generate(
                {**variables, **self._variables},
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=end is PromptEnd.ANSWER,
            ):
                num_bytes += len(piece.encode())
                if mark:
                    num_bytes -= piece.count(mark) * len(mark.encode())
                if num_bytes > max_bytes:
                    raise TemplateError(
                        f"the conversation makes a prompt of more than {max_bytes} bytes"
                    )
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses: {error.message}") from None
        except _FAILURES as error:
            raise TemplateError(f"the chat template fails: {error}") from None
        return "".join(pieces)

    def _probe(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        """Renders an example; None if the template fails."""
        self._environment.mark = ""
        try:
            return self._generate(messages, tools, {}, _MAX_PROBE_BYTES)
        except TemplateError:
            return None

    def _with_stand_ins(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[Message]]:
        """Returns a conversation and its tools in roles and texts that the template shows."""
        messages = [self._adapted(message) for message in messages]
        lacks_tools = bool(tools) and not self.takes_tools
        lacks_calls = not self.takes_tool_calls and any("tool_calls" in each for each in messages)
        if self._writes_tools and (lacks_tools or lacks_calls):
            messages = with_written_tools(messages, tools if lacks_tools else ())
            tools = () if lacks_tools else tools
        if not self._is_strict:
            if _roles_with_images(messages) and not self._forms.takes_images("tool"):
                messages = with_results_as_user(
                    messages, takes_user_next=lambda: self._forms.takes_user_after_results
                )
            messages = with_system_as_user(
                messages,
                shows_first=lambda: self._forms.shows_system,
                shows_later=lambda: self._forms.shows_later_system,
            )
        return messages, tools

    def _adapted(self, message: Message) -> Message:
        """Returns a message with the role and names that the template knows."""
        if message.get("role") == _DEVELOPER and not self._knows_developer:
            message = {**message, "role": _SYSTEM}
        return self._with_reasoning(message)

    def _with_reasoning(self, message: Message) -> Message:
        """Returns a message with its reasoning under the template's name for it."""
        if "reasoning_content" not in message:
            return message
        renamed = dict(message)
        reasoning = renamed.pop("reasoning_content")
        if self._reasoning_key is not None:
            return {**renamed, self._reasoning_key: reasoning}
        # Templates with this tag drop earlier reasoning from contents, too.
        if "</think>" in self._source or not self._is_strict:
            return renamed
        raise TemplateError("the model's chat template takes no reasoning_content")

    def _with_switch(self, variables: Mapping[str, Any], *, reasons: bool) -> dict[str, Any]:
        """Returns variables with the one that turns the reasoning on or off, if there is one."""
        switched = dict(variables)
        if not reasons and _EFFORT not in self._known and switched.get(_EFFORT) == _NO_EFFORT:
            del switched[_EFFORT]
        switch = next((name for name in REASONING_SWITCHES if name in self._known), None)
        if switch is None:
            is_off = "thinking_mode" in self._known and not reasons
            return {"thinking_mode": "disabled", **switched} if is_off else switched
        if switched.setdefault(switch, reasons) is not reasons:
            told = "on" if reasons else "off"
            raise TemplateError(f"{switch} contradicts the wish that reasoning is {told}")
        return switched

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuses variables that the template would ignore."""
        for name in variables:
            if name not in self._known:
                raise TemplateError(f"the model's chat template takes no variable {name!r}")

    def _check_images(self, messages: Sequence[Message]) -> None:
        """Refuses images that the template would leave out or write as text."""
        for role in _roles_with_images(messages):
            if not self._forms.takes_images(role):
                raise TemplateError(
                    f"the model's chat template takes no images in messages of {role!r}"
                )

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Refuses tools that the template would leave out."""
        if tools and not self.takes_tools:
            raise TemplateError("the model's chat template takes no tools")
        if not self.takes_tool_calls and any("tool_calls" in message for message in messages):
            raise TemplateError("the model's chat template takes no tool calls")


def _roles_with_images(messages: Sequence[Message]) -> list[str]:
    """Returns the roles whose messages have images."""
    return sorted({each["role"] for each in messages if has_images(each.get("content"))})
