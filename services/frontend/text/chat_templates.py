"""A model's chat templates: one, or a second one for conversations with tools."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.text.chat_template import ChatTemplate, Message, TemplateError
from services.frontend.text.prompt_end import PromptEnd


class ChatTemplates:
    """Renders each conversation with the template that transformers would choose."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        """Compiles the templates.

        Raises:
            TemplateError: the template without tools is not valid Jinja.
        """
        self._opening = opening
        self._without_tools = self._compile(opening["source"])
        self._with_tools: ChatTemplate | TemplateError | None = None
        if opening["tool_source"] is not None:
            try:
                self._with_tools = self._compile(opening["tool_source"])
            except TemplateError as error:
                self._with_tools = error

    def render(self, conversation: Mapping[str, Any]) -> str:
        """Returns the prompt for the answer to a conversation.

        Raises:
            TemplateError: see `ChatTemplate.render`.
        """
        messages: Sequence[Message] = conversation["messages"]
        tools: Sequence[Message] = conversation["tools"]
        template = self._with_tools if tools and self._with_tools else self._without_tools
        if isinstance(template, TemplateError):
            raise TemplateError(f"of the template for tools: {template}")
        template.set_time(datetime.datetime.fromisoformat(conversation["now"]))
        return template.render(
            messages,
            tools=tools,
            variables=conversation["variables"],
            reasons=conversation["reasons"],
            end=PromptEnd(conversation["end"]),
            max_bytes=conversation["max_bytes"],
            marks_content=conversation["marks_content"],
        )

    def _compile(self, source: str) -> ChatTemplate:
        opening = self._opening
        return ChatTemplate(
            source,
            opening["variables"],
            special_tokens=opening["special_tokens"],
            is_strict=opening["is_strict"],
            writes_tools=opening["writes_tools"],
        )
