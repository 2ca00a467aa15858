"""The process of long texts, started by `tokenizer_process`.

The opening message is the memory that the process may take, and a tokenizer.json. Questions and
answers are pickled; both come from this code alone.
"""

import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from services.frontend.text.encoder import Encoder, Encoding
from services.frontend.text.library_errors import EncodingError, TooManyTokensError
from services.processes.allocator import release_free_memory
from services.processes.helper_program import Refusal, limit_resources, run_helper

OPENING = struct.Struct(">Q")
"""Head of the opening message: bytes of memory."""
_NICENESS = 5
"""The event loop has priority on a shared core."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The arguments of `Encoder.decode`, with packed token ids."""

    token_ids: bytes
    show_special_tokens: bool

    @classmethod
    def of(cls, token_ids: Sequence[int], show_special_tokens: bool) -> Self:
        """Packs token ids."""
        return cls(pack_ids(token_ids), show_special_tokens)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Packs token ids for another process of this machine."""
    return np.array(token_ids, dtype=np.uint32).tobytes()


def read_ids(packed: bytes) -> list[int]:
    """Unpacks token ids."""
    ids: list[int] = np.frombuffer(packed, dtype=np.uint32).tolist()
    return ids


def open_tokenizer(opening: bytes) -> Callable[[bytes], bytes]:
    """Reads a tokenizer and returns the function that answers questions."""
    os.nice(_NICENESS)
    [max_memory_bytes] = OPENING.unpack_from(opening)
    limit_resources(max_memory_bytes=max_memory_bytes)
    encoder = Encoder(opening[OPENING.size :])

    def answer(question: bytes) -> bytes:
        try:
            return pickle.dumps(_answer(encoder, pickle.loads(question)), pickle.HIGHEST_PROTOCOL)
        except EncodingError as error:
            raise Refusal(str(error)) from None
        finally:
            release_free_memory()

    return answer


def _answer(encoder: Encoder, asked: Encoding | Decoding) -> bytes | int | str:
    """Returns packed token ids, their number if they are too many, or a text."""
    if isinstance(asked, Decoding):
        ids = read_ids(asked.token_ids)
        return encoder.decode(ids, show_special_tokens=asked.show_special_tokens)
    try:
        return pack_ids(asked.run(encoder))
    except TooManyTokensError as error:
        return error.num_tokens


if __name__ == "__main__":
    # Pickle needs the same module names at both ends; here this module is __main__.
    from services.frontend.text import tokenizer_worker

    run_helper(tokenizer_worker.open_tokenizer)
