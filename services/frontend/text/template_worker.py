"""The process of a model's chat templates, started by `template_process`.

Messages are JSON. The process has no environment, opens no files, starts no processes, and has
limited memory.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.frontend.text.chat_template import ChatTemplate, Message, TemplateError
from services.frontend.text.prompt_end import PromptEnd
from services.processes.helper_program import Refusal, limit_resources, run_helper

MAX_MEMORY_BYTES = 512 * 2**20


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


def open_templates(opening: bytes) -> Callable[[bytes], bytes]:
    """Compiles a model's templates and returns the function that renders conversations.

    Raises:
        Refusal: the templates are invalid.
    """
    limit_resources(max_memory_bytes=MAX_MEMORY_BYTES)
    try:
        templates = ChatTemplates(json.loads(opening))
    except TemplateError as error:
        raise Refusal(str(error)) from None
    except MemoryError:
        raise Refusal("the chat template needs too much memory") from None

    def render(question: bytes) -> bytes:
        try:
            return templates.render(json.loads(question)).encode()
        except TemplateError as error:
            raise Refusal(str(error)) from None
        except MemoryError:
            raise Refusal("the chat template needs too much memory") from None

    return render


if __name__ == "__main__":
    run_helper(open_templates)
