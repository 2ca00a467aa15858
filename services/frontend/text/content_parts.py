"""Contents of messages: texts, or lists of parts where images are among them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Part = Mapping[str, Any]
"""{"type": "text", "text": ...} or {"type": "image"}, as transformers has them."""
Content = str | Sequence[Part]


def text_part(text: str) -> Part:
    """Returns a part with a text."""
    return {"type": "text", "text": text}


def parts_of(content: Content | None) -> list[Part]:
    """Returns a content's parts; a text is one, and an empty one none."""
    if content is None or isinstance(content, str):
        return [text_part(content)] if content else []
    return list(content)


def joined(contents: Iterable[Content | None], separator: str = "") -> Content:
    """Joins contents with a text between each two: a text, or parts if one of them has images.

    No two texts among the parts are neighbours.
    """
    parts: list[Part] = []
    for number, content in enumerate(contents):
        for part in [*parts_of(separator if number else ""), *parts_of(content)]:
            if parts and part["type"] == parts[-1]["type"] == "text":
                parts[-1] = text_part(parts[-1]["text"] + part["text"])
            else:
                parts.append(part)
    if has_images(parts):
        return parts
    return "".join(part["text"] for part in parts)


def has_images(content: Content | None) -> bool:
    """Whether a content has images."""
    if content is None or isinstance(content, str):
        return False
    return any(part["type"] == "image" for part in content)
