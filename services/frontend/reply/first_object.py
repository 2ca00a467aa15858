"""Finds a JSON object that other text follows."""

from services.frontend.reply.incoming_text import (
    IncomingText,
    UnexpectedTextError,
    pieces_of,
)


def first_object(text: str) -> str:
    """Returns the JSON object that a text begins with, or the text if it begins with none."""
    if not text.lstrip().startswith("{"):
        return text
    incoming, found = IncomingText(), list[str]()
    reading = incoming.json_value(found.append)
    try:
        for piece in pieces_of(text.strip()):
            incoming.push(piece)
            next(reading, None)
        incoming.end()
        for _ in reading:
            raise AssertionError("it waits for text after the end")
    except UnexpectedTextError:
        return text
    return "".join(found)
