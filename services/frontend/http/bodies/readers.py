"""The parsers of bodies by name, in the frontend and in the process for large bodies."""

from typing import Literal

from services.frontend.http.bodies.calls import (
    ReadCall,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from services.frontend.http.messages.calls import read_count, read_message
from services.frontend.http.responses.calls import read_input_tokens, read_response

Reader = Literal[
    "completion",
    "chat",
    "message",
    "message_count",
    "response",
    "input_tokens",
    "tokenize",
    "detokenize",
]

READERS: dict[Reader, ReadCall] = {
    "completion": read_completion,
    "chat": read_chat,
    "message": read_message,
    "message_count": read_count,
    "response": read_response,
    "input_tokens": read_input_tokens,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
}
