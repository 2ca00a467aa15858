"""How the prompt of a conversation ends: before an answer, after its messages, or in the last one.

Templates put markers after a message, and some strip or rewrite its text. So a text that the reply
continues gets a tag at its end, and the prompt is what a template renders before the tag.

Source: transformers 5.23, utils/chat_template_utils.py, `render_jinja_template`.
"""

import enum
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class PromptEnd(enum.StrEnum):
    """The end of a conversation's prompt."""

    ANSWER = "answer"
    """After the template's beginning of an answer."""
    MESSAGES = "messages"
    """After the last message, without that beginning."""
    LAST_MESSAGE = "last_message"
    """In the last message, which the reply continues."""


class LostTextError(ValueError):
    """A template does not show the text that is to be continued."""


class OpenText:
    """The text of the last message, which has no end yet."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """Takes a conversation.

        Raises:
            LostTextError: the last message has no text.
        """
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise LostTextError("the last message has no content to continue")
        self._text = content.strip()
        # Templates that trim the text take the space, and so show that they trim.
        self._tag = f"OPEN_{secrets.token_hex(8)} "

    def tagged(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the conversation with a tag after the text, which may be a list of parts."""
        *earlier, last = messages
        content = last["content"]
        if isinstance(content, str):
            content += self._tag
        else:
            *others, part = content
            content = [*others, {**part, "text": part["text"] + self._tag}]
        return [*earlier, {**last, "content": content}]

    def cut(self, rendered: str, mark: str) -> str:
        """Returns a rendered prompt up to the end of the text.

        `mark` is in neither text and counts as absent. White space at the end of the text goes
        where the template trims it.

        Raises:
            LostTextError: the template does not show the text as it is.
        """
        word = self._tag.strip()
        end = rendered.rfind(word)
        if end < 0 or self._text not in rendered.replace(mark, ""):
            raise LostTextError(
                "the chat template does not show the last message's content as it is, so it cannot"
                " be continued"
            )
        if rendered.startswith(self._tag, end):
            return rendered[:end]
        while end and (rendered[end - 1].isspace() or rendered[end - 1] == mark):
            end -= 1
        return rendered[:end]

    def untagged(self, text: str) -> str:
        """Returns a text without the tag."""
        return text.replace(self._tag, "").replace(self._tag.strip(), "")
