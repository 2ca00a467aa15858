"""Images in the messages of a conversation, as callers send them."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.frontend.text.chat_template import Message
from services.frontend.text.content_parts import Content

_FILE = "file"
"""The key of a part with the image itself, which no template gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """An image: the bytes of a file, or where to fetch them."""

    data: bytes = b""
    url: str = ""
    """Empty if the file is here."""
    is_low_detail: bool = False
    """Whether few patches are enough."""


def image_content(file: ImageFile) -> Content:
    """Returns a content with an image alone, for `joined`."""
    return [{"type": "image", _FILE: file}]


def images_of(messages: Sequence[Message]) -> list[ImageFile]:
    """Returns the images of messages, in their order."""
    return [
        part[_FILE]
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if _FILE in part
    ]


def with_files(messages: Sequence[Message], files: Sequence[ImageFile]) -> list[Message]:
    """Returns messages that had their images left out, with their images."""
    left = iter(files)
    return [
        {
            **message,
            "content": [
                {**part, _FILE: next(left)} if part["type"] == "image" else part for part in content
            ],
        }
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def without_files(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in JSON's types, as templates get them."""
    return [
        {**message, "content": [{"type": "image"} if _FILE in part else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
