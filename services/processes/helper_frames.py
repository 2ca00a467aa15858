"""The messages between a service and its helper processes: a header and bytes.

A question's header has its length, the seconds its answer may take, and whether it is in memory;
an answer's header has its length and what kind of answer it is. Bytes in memory follow no
header: see `message_memory`.
"""

import struct
from enum import IntEnum

QUESTION_HEADER = struct.Struct(">Id?")
ANSWER_HEADER = struct.Struct(">IB")


class AnswerKind(IntEnum):
    """The kind of an answer's bytes."""

    ANSWER = 0
    """The answer itself."""
    REFUSAL = 1
    """UTF-8 text that says why there is no answer."""
    IN_MEMORY = 2
    """The answer itself, in memory."""
