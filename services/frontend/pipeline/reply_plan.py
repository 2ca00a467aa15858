"""Plans the reading of a chat's reply."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.frontend.engine_client.messages import SamplingParams, TaggedText
from services.frontend.errors import InvalidRequestError
from services.frontend.pipeline.request import Conversation, Prompt
from services.frontend.pipeline.tools import schemas_of
from services.frontend.reply.bare_values import ArgumentSchemas
from services.frontend.reply.call_rules import CallRules
from services.frontend.reply.reply_format import ReasoningState, ReplyFormat, ReplySettings
from services.frontend.reply.reply_reader import ReplyReader, Tools

_SAY_NOTHING = frozenset(
    {
        "type", "title", "description", "$schema", "$id", "$comment", "$defs", "definitions",
        "$ref", "allOf",
    }
)  # fmt: skip
"""Keywords of a schema that name no arguments themselves."""
_PLAIN_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How the replies to one conversation are sampled and read."""

    form: ReplyFormat
    tools: Tools
    is_reasoning: bool
    continues: bool
    """Whether replies begin inside a text of the prompt."""
    sampling: SamplingParams | None
    """The caller's sampling, with the grammar of demanded calls."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The text of each token, with the special tokens of the format."""
        return self.form.token_bytes

    def new_reader(self) -> ReplyReader:
        """Returns a reader for one reply."""
        return self.form.reader(
            self.tools, is_reasoning=self.is_reasoning, continues=self.continues
        )


def plan_reply(
    form: ReplyFormat | None,
    prompt: Prompt,
    token_ids: Sequence[int],
    sampling: SamplingParams | None,
    *,
    replies: ReplySettings,
) -> ReplyPlan | None:
    """Returns the plan for the replies to a conversation; None passes their text on.

    Args:
        form: the format of the model's replies; None if it has no chat template.
        prompt: the prompt.
        token_ids: the prompt's tokens.
        sampling: the caller's sampling.
        replies: the operator's settings.

    Raises:
        InvalidRequestError: the format cannot keep the rules for calls.
    """
    if form is None or not isinstance(prompt, Conversation):
        return None
    tools = schemas_of(prompt.tools)
    open_text = prompt.open_text.rstrip()
    reasoning = form.reasoning_after(token_ids, open_text=open_text)
    if replies.is_strict and prompt.reasons and reasoning is ReasoningState.CLOSED:
        problem = "the reply continues a content" if open_text else "the model does not reason"
        raise InvalidRequestError(f"thinking: {problem}", field="thinking")
    in_content = bool(open_text) and reasoning is ReasoningState.CLOSED
    calls = _calls(form, prompt.call_rules, tools, sampling, in_content=in_content)
    if not form.reads(tools):
        return None
    own = SamplingParams()
    if sampling is not None:
        own.CopyFrom(sampling)
    if calls is not None:
        own.structured_output.tagged.CopyFrom(calls)
    limit = prompt.max_reasoning_tokens
    limit = replies.max_reasoning_tokens if limit is None else limit
    if prompt.wants_reasoning is False:
        limit = 0  # the template may be unable to turn it off
    has_form = own.HasField("structured_output")
    # After reasoning that is cut short, a model without a form of output may still call its tools.
    may_call = bool(tools) and not has_form
    preamble = form.preamble(reasoning, is_call=calls is not None or may_call)
    if preamble is not None and (has_form or limit is not None):
        wanted = own.structured_output
        if not wanted.HasField("preamble"):
            wanted.preamble.CopyFrom(preamble)
        if limit is not None and not wanted.preamble.HasField("max_tokens"):
            wanted.preamble.max_tokens = limit
    is_reasoning = reasoning is ReasoningState.OPEN
    # White space directly after the marker of reasoning is no part of the reasoning.
    begins = is_reasoning and open_text.endswith(form.reader.think[0])
    continues = bool(open_text) and not begins
    return ReplyPlan(form, tools, is_reasoning, continues, own)


def continue_form(
    form: ReplyFormat | None, prompt: Prompt, sampling: SamplingParams | None
) -> SamplingParams | None:
    """Returns sampling whose form of output includes the text that the reply continues.

    Reasoning at the beginning of the text is no part of the form.
    """
    if sampling is None or not isinstance(prompt, Conversation):
        return sampling
    begun = prompt.open_text
    if sampling.structured_output.WhichOneof("grammar") is None or not begun:
        return sampling
    if form is not None and form.has_reasoning:
        if form.reasoning_after((), open_text=begun.rstrip()) is ReasoningState.OPEN:
            return sampling
        _, marker, after = begun.rpartition(form.reader.think[1])
        begun = after.lstrip() if marker else begun
    own = SamplingParams()
    own.CopyFrom(sampling)
    own.structured_output.begun = begun
    return own


def _calls(
    form: ReplyFormat,
    rules: CallRules,
    tools: Tools,
    sampling: SamplingParams | None,
    *,
    in_content: bool,
) -> TaggedText | None:
    """Returns the grammar that keeps the rules; None if they need none.

    Raises:
        InvalidRequestError: the format has no such grammar, or the caller gives another one.
    """
    if not rules.need_grammar:
        return None
    field = "tool_choice" if rules.is_required else "parallel_tool_calls"
    field = "tools" if not rules.is_required and rules.strict else field
    if sampling is not None and sampling.HasField("structured_output"):
        if not rules.is_required:
            return None  # the caller's grammar leaves no calls
        raise InvalidRequestError("a demanded call allows no other form of output", field=field)
    own = form.reader.call_form
    is_beside_text = in_content or not rules.is_required
    if own is None or (is_beside_text and not own.trigger):
        what = "demanded calls" if rules.is_required else "strict or single calls beside text"
        what += " after a content that has begun" if in_content else ""
        raise InvalidRequestError(
            f"{what} are not supported with the model's format of calls, {form.name}", field=field
        )
    for name in tools:
        if not _PLAIN_NAME.fullmatch(name):
            raise InvalidRequestError(
                f"the tool {name!r} has characters other than letters, digits and _.-, which no"
                " grammar of calls can have",
                field="tools",
            )
    is_exact = {name: rules.is_required or name in rules.strict for name in tools}
    schemas = {
        name: _with_no_other(schema) if is_exact[name] else {}
        for name, schema in tools.items()
        if rules.name in ("", name)
    }
    return own.tagged_text(schemas, is_required=rules.is_required, is_single=rules.is_single)


def _with_no_other(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema of a function's arguments; one that names none allows none.

    Source: OpenAI's reference, "omitting parameters defines a function with an empty parameter
    list". A grammar would otherwise let the model make some up.
    """
    parts = ArgumentSchemas(schema).parts
    names_none = all(key in _SAY_NOTHING or not part[key] for part in parts for key in part)
    return {**schema, "additionalProperties": False} if names_none else schema
